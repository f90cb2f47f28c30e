"""Tunix's side of the learner benchmark; runs in its own environment and prints one JSON object as its last line.

    JAX_PLATFORMS=cpu .venv-tunix/bin/python scripts/bench/peer_tunix.py learner --case full --model models/smollm2

Its GRPO loss, model and trainer on fixed completions, wired as its GRPOLearner does; nothing is generated, beta 0.
No rematerialisation unless asked for, which is its faster setting. For Llama models.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
from cases import Case, make_case
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import common, function_registry
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

PAD = 0  # the cases hold no such id


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learner",))
    parser.add_argument("--case", choices=("full", "variable"), default="full")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--micro", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--steps", type=int, default=1, help="timed updates, after two that warm up")
    parser.add_argument("--remat", action="store_true", help="recompute each decoder layer")
    options = parser.parse_args()
    found = learner(options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / processes.GIB
    processes.print_json({**found, "peak_rss_gib": peak})
    return 0


def learner(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an update over all micro-batches."""
    case = make_case(options.case, options.tokens)
    micro = min(options.micro, len(case.lengths))
    scaled = options.case == "variable"
    micro_batches = len(case.lengths) // micro
    timed = 1 if scaled else micro_batches
    model = _model(options)
    trainer = _trainer(model, timed)
    vocab = model.config.vocab_size
    first = len(case.lengths) - timed * micro  # the longest sequences; each is padded to the same width
    batches = [_example(case, range(start, start + micro), vocab) for start in range(first, len(case.lengths), micro)]
    seconds, cpu_s = [], []
    for _ in range(2 + options.steps):  # the second one compiles again: it gets the optimizer's state as it came out
        began, cpu_began = time.perf_counter(), time.process_time()
        trainer.train(batches)
        jax.block_until_ready(nnx.state(trainer.model))
        seconds.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - cpu_began)
    update_s = min(seconds[2:]) * (micro_batches if scaled else 1)
    return {
        "peer": "tunix",
        "tokens": case.tokens,
        "update_s": update_s,
        "tokens_per_s": case.tokens / update_s,
        "timed_cpu_s": cpu_s[2:],
        "timed_s": seconds,
        "micro_batch": [micro, case.width],
        "micro_batches": micro_batches,
        "scaled_from_one_micro_batch": scaled,
        "first_grad_norm": float(trainer.first_grad_norm),
    }


class _Trainer(Trainer):
    """Remembers the norm of the first gradient."""

    first_grad_norm: Any = None

    def _buffer_metrics(self, buffered: Any, *, additional_metrics: Any, **rest: Any) -> Any:
        if self.first_grad_norm is None:
            self.first_grad_norm = additional_metrics["grad_norm"][0]
        return super()._buffer_metrics(buffered, additional_metrics=additional_metrics, **rest)


def _model(options: argparse.Namespace) -> Any:
    hf = json.loads((options.model / "config.json").read_text())
    if hf["model_type"] != "llama":
        raise SystemExit(f"{options.model} is a {hf['model_type']} model; this script runs Llama models")
    rope_theta = hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"]
    config = llama.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=int(rope_theta),
        norm_eps=hf["rms_norm_eps"],
        weight_tying=hf["tie_word_embeddings"],
        remat_config=llama.RematConfig.DECODER if options.remat else llama.RematConfig.NONE,
    )
    return llama_params.create_model_from_safe_tensors(str(options.model), config, dtype=jnp.dtype(options.dtype))


def _trainer(model: Any, micro_batches: int) -> _Trainer:
    config = GRPOConfig(num_generations=2, beta=0.0, loss_agg_mode="token-mean")
    config.temperature = 1.0
    policy_loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)

    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        return policy_loss(model, train_example, algo_config=config, pad_id=PAD, eos_id=2)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
    accumulation = micro_batches if micro_batches > 1 else None
    training = TrainingConfig(eval_every_n_steps=10**9, max_steps=10**6, gradient_accumulation_steps=accumulation)
    trainer = _Trainer(model, optimizer, training, custom_checkpoint_metadata_fn=dict)
    trainer.is_managed_externally = True  # each call of `train` is one update
    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": config})
    return trainer


def _example(case: Case, numbers: range, vocab: int) -> common.TrainExample:
    """Prompts padded on the left and completions on the right, to the case's width."""
    prompts = max(case.prompts)
    prompt_ids = np.full((len(numbers), prompts), PAD, np.int32)
    completion_ids = np.full((len(numbers), case.width - prompts), PAD, np.int32)
    for row, number in enumerate(numbers):
        ids, cut = case.ids(number, vocab), case.prompts[number]
        prompt_ids[row, prompts - cut :] = ids[:cut]
        completion_ids[row, : len(ids) - cut] = ids[cut:]
    return common.TrainExample(
        prompt_ids=jnp.asarray(prompt_ids),
        prompt_mask=jnp.asarray(prompt_ids != PAD),
        completion_ids=jnp.asarray(completion_ids),
        completion_mask=jnp.asarray(completion_ids != PAD),
        advantages=jnp.asarray([case.advantage(number) for number in numbers], jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )


if __name__ == "__main__":
    sys.exit(main())
