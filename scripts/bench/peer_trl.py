"""TRL's side of the benchmarks; runs in its own environment and prints one JSON object as its last line.

    .venv-trl/bin/python scripts/bench/peer_trl.py learner --case full --model models/smollm2
    .venv-trl/bin/python scripts/bench/peer_trl.py end_to_end --model models/smollm2

`learner`: the GRPOTrainer's own training step on fixed completions, nothing is generated. `end_to_end`: its whole step.
No gradient checkpointing unless asked for, which is its faster setting; beta 0, so there is no reference model.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from typing import Any

import processes
import torch
import toy_task
from cases import Case, make_case
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learner", "end_to_end"))
    parser.add_argument("--case", choices=("full", "variable"), default="full")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--micro", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--steps", type=int, default=1, help="timed steps, after one that warms up")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = learner(options, folder) if options.what == "learner" else end_to_end(options, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / processes.GIB
    processes.print_json({**found, "peak_rss_gib": peak, "torch_threads": torch.get_num_threads()})
    return 0


def learner(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Seconds of an update: forward and backward pass of every micro-batch, and the optimizer's step."""
    case = make_case(options.case, options.tokens)
    micro = min(options.micro, len(case.lengths))
    scaled = options.case == "variable"
    count = micro if scaled else len(case.lengths)  # of the longest sequences; each is padded to the same width
    batch = _batch(case, range(len(case.lengths) - count, len(case.lengths)), _vocab(options))
    clock = Clock()
    trainer = FixedCompletions(
        batch,
        **_parts(options, [{"prompt": "none"}] * 8, lambda completions, **_: [0.0] * len(completions)),
        args=_config(options, folder, micro, count // micro, num_generations=2, max_completion_length=case.width),
        callbacks=[clock],
    )
    trainer.train()
    micro_batches = len(case.lengths) // micro
    # what accumulation repeats, and what comes once per update
    passes = min(clock.passes[1:]) * (micro_batches if scaled else 1)
    update_s = passes + min(clock.optimizer[1:])
    return {
        "peer": "trl",
        "tokens": case.tokens,
        "update_s": update_s,
        "tokens_per_s": case.tokens / update_s,
        "timed_cpu_s": clock.cpu[1:],
        "passes_s": clock.passes,
        "optimizer_s": clock.optimizer,
        "micro_batch": [micro, case.width],
        "micro_batches": micro_batches,
        "scaled_from_one_micro_batch": scaled,
        "first_grad_norm": trainer.state.log_history[0]["grad_norm"],
    }


def end_to_end(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Seconds of whole steps on the toy task, generation and learning apart."""
    rows = [
        {"prompt": [{"role": "user", "content": toy_task.prompt(i)}], "bound": toy_task.bound(i)} for i in range(64)
    ]

    def reward(completions: list[Any], bound: list[int], **_: Any) -> list[float]:
        return [toy_task.reward(c[0]["content"], n) for c, n in zip(completions, bound, strict=True)]

    clock, size = Clock(), toy_task.PROMPTS * toy_task.REPLIES
    micro = min(options.micro, size)
    trainer = TimedGeneration(
        **_parts(options, rows, reward),
        args=_config(
            options,
            folder,
            micro,
            size // micro,
            num_generations=toy_task.REPLIES,
            max_completion_length=toy_task.NEW_TOKENS,
        ),
        callbacks=[clock],
    )
    trainer.train()
    steps = clock.steps[1:]
    generate = trainer.generate_s[1:]
    learn = [step - part for step, part in zip(steps, generate, strict=True)]
    best = min(range(len(steps)), key=steps.__getitem__)
    return {
        "peer": "trl",
        "step_s": steps[best],
        "generate_s": generate[best],
        "learn_s": learn[best],
        "steps_s": steps,
        "generated_tokens": trainer.generated[1:],
        "reward": [row["reward"] for row in trainer.state.log_history if "reward" in row],
        "replies_per_step": size,
    }


class FixedCompletions(GRPOTrainer):
    """The trainer with completions that are given instead of generated."""

    def __init__(self, batch: dict[str, torch.Tensor], **arguments: Any) -> None:
        self._batch = batch
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self._batch)


class TimedGeneration(GRPOTrainer):
    """The trainer, with the time that generating and scoring replies takes."""

    def __init__(self, **arguments: Any) -> None:
        self.generate_s: list[float] = []
        self.generated: list[int] = []
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        began = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.generate_s.append(time.perf_counter() - began)
        self.generated.append(int(made["completion_mask"].sum()))
        return made


class Clock(TrainerCallback):
    """When a step begins, when its gradients are there, when it ends."""

    def __init__(self) -> None:
        self.passes: list[float] = []
        self.optimizer: list[float] = []
        self.steps: list[float] = []
        self.cpu: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The batch is there, the first forward pass begins."""
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """All gradients are there."""
        self._gradients = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The parameters have moved."""
        now = time.perf_counter()
        self.passes.append(self._gradients - self._began)
        self.optimizer.append(now - self._gradients)
        self.steps.append(now - self._began)
        self.cpu.append(time.process_time() - self._cpu_began)


def _parts(options: argparse.Namespace, rows: list[dict[str, Any]], reward: Any) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    return {
        "model": model,
        "processing_class": tokenizer,
        "reward_funcs": reward,
        "train_dataset": Dataset.from_list(rows),
    }


def _config(options: argparse.Namespace, folder: str, micro: int, micro_batches: int, **more: Any) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=micro_batches,
        max_steps=1 + options.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=toy_task.TEMPERATURE,
        gradient_checkpointing=options.gradient_checkpointing,
        bf16=options.dtype == "bfloat16",
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **more,
    )


def _batch(case: Case, numbers: range, vocab: int) -> dict[str, torch.Tensor]:
    """Prompts padded on the left and completions on the right, as the trainer makes them, to the case's width."""
    prompts = max(case.prompts)
    rows = {name: [] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    for number in numbers:
        ids, cut = case.ids(number, vocab), case.prompts[number]
        left, right = prompts - cut, case.width - prompts - (len(ids) - cut)
        rows["prompt_ids"].append([0] * left + ids[:cut])
        rows["prompt_mask"].append([0] * left + [1] * cut)
        rows["completion_ids"].append(ids[cut:] + [0] * right)
        rows["completion_mask"].append([1] * (len(ids) - cut) + [0] * right)
    batch = {name: torch.tensor(values) for name, values in rows.items()}
    batch["advantages"] = torch.tensor([case.advantage(number) for number in numbers])
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    return batch


def _vocab(options: argparse.Namespace) -> int:
    return len(AutoTokenizer.from_pretrained(options.model))


if __name__ == "__main__":
    sys.exit(main())
