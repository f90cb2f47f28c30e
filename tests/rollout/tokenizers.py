"""Real fast tokenizers, made on the spot, and the real chat templates that the trl wheel ships."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hermes_jax.rollout.codec import HFCodec

SMOLLM2 = Path(os.environ.get("HERMES_JAX_SMOLLM2") or Path(__file__).parents[2] / "models" / "smollm2")
TEXTS = [
    "The quick brown fox jumps over the lazy dog, 3.14 times; naïve café – ça va?",
    'call the tool {"name": "ping", "arguments": {"n": 1}} and wait for its result',
    "user assistant system tool message content\n\nYou are a helpful assistant.",
] * 3
ONLY_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_CONTROL = re.compile(
    r"<[|｜][^|｜<>\s{}'\"+]{1,40}[|｜]?>|<[a-z_]+[|]>|</?(?:think|tool_call|tool_response|bos|s)>|<(?:start|end)_of_turn>"
    r"|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>"
)
_MORE = ("<|endoftext|>", "<|begin_of_text|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<end_of_turn>")


@cache
def templates() -> dict[str, str]:
    """Name -> Jinja text of every chat template in the installed trl."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    files = sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


@cache
def control_tokens() -> tuple[str, ...]:
    """What looks like a control token in any of these templates."""
    found = {token for text in templates().values() for token in _CONTROL.findall(text)}
    return tuple(sorted(found | set(_MORE)))


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """A small byte-level BPE that knows all these control tokens and adds a bos token of its own accord."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    return _finished(backend)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """A SentencePiece-like BPE with byte fallback, which puts a space before the first word only."""
    byte_tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=byte_tokens, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    trained = json.loads(backend.to_str())
    backend = Tokenizer.from_str(
        json.dumps(trained | {"added_tokens": []})
    )  # the bytes are pieces of the vocabulary only
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(backend)


def _finished(backend: Tokenizer) -> PreTrainedTokenizerFast:
    added = [AddedToken(t, special=t not in ONLY_ADDED, normalized=False) for t in control_tokens()]
    backend.add_tokens(added)
    bos = "<|begin_of_text|>"
    backend.post_processor = processors.TemplateProcessing(
        f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )


@cache
def smollm2() -> PreTrainedTokenizerFast:
    """The real tokenizer of SmolLM2-135M-Instruct; fails where the model folder is not there."""
    if not (SMOLLM2 / "tokenizer.json").is_file():
        pytest.fail("models/smollm2 is missing: python scripts/get_smollm2.py --to models/smollm2")
    return PreTrainedTokenizerFast.from_pretrained(str(SMOLLM2), local_files_only=True)


TOKENIZERS = {"byte_level": byte_level, "metaspace": metaspace, "smollm2": smollm2}


@cache
def codec(name: str) -> HFCodec:
    """One of these tokenizers, ready for rendering."""
    return HFCodec(TOKENIZERS[name]())
