"""A small Qwen3-type model with its own tokenizer, made on the spot in Hugging Face format.

It knows nothing at first; the warm start teaches it the tool-call format and some habits, good and bad.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from envs.terminal_test.tasks import make_task, scripted_command

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # one token each, but ordinary text: replies hold them
VOCAB_SIZE = 448

# Tools are shown by name alone: this policy learns their arguments from the warm start, and tokens are dear.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 320, 2, 8, 4, 16
CONTEXT = 512
END_OF_TURN, PAD = SPECIALS.index("<|im_end|>"), SPECIALS.index("<|endoftext|>")

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": END_OF_TURN,
    "pad_token_id": PAD,
    "dtype": "float32",
}


def build(folder: Path, seed: int) -> None:
    """Writes the untrained policy to `folder`: config, weights, tokenizer, chat template, generation config.

    Args:
        folder: made by this call; an existing one is replaced.
        seed: of the initial weights; the tokenizer does not depend on it.
    """
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _train_tokenizer().save(str(aside / "tokenizer.json"))
    _write_json(
        aside / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )
    (aside / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(aside / "config.json", CONFIG)
    _write_json(aside / "generation_config.json", {"eos_token_id": END_OF_TURN, "pad_token_id": PAD})
    save_file(_initial_weights(seed), aside / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, the model has {VOCAB_SIZE}")
    return tokenizer


def _corpus(tasks: int = 4000) -> Iterator[str]:
    """Texts of training episodes, without the special tokens."""
    rng = np.random.default_rng(0)
    for index in range(tasks):
        task = make_task("train", index)
        command, output = scripted_command(task, rng)
        yield f"user\n{task.prompt}"
        yield f'assistant\n{{"name": "terminal", "arguments": {{"command": "{command}"}}}}\n'
        yield f"tool\n{output}"
        yield "tools\nterminal read_file write_file \n"
        yield "assistant\ndone"


def _initial_weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

    def linear(out: int, into: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((out, into)) * scale / math.sqrt(into)).astype(np.float32)

    residual = 1 / math.sqrt(2 * LAYERS)  # keeps the residual stream's variance near one at any depth
    weights = {"model.embed_tokens.weight": (rng.standard_normal((VOCAB_SIZE, HIDDEN)) * 0.05).astype(np.float32)}
    for n in range(LAYERS):
        prefix = f"model.layers.{n}"
        weights[f"{prefix}.self_attn.q_proj.weight"] = linear(q, HIDDEN)
        weights[f"{prefix}.self_attn.k_proj.weight"] = linear(kv, HIDDEN)
        weights[f"{prefix}.self_attn.v_proj.weight"] = linear(kv, HIDDEN)
        weights[f"{prefix}.self_attn.o_proj.weight"] = linear(HIDDEN, q, residual)
        weights[f"{prefix}.mlp.gate_proj.weight"] = linear(MLP, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = linear(MLP, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = linear(HIDDEN, MLP, residual)
        for name, size in (("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM)):
            weights[f"{prefix}.{name}.weight"] = np.ones(size, np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    return weights
