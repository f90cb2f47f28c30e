"""The tokenizer of a model folder, and what follows from it. Never imports torch.

transformers is imported when a tokenizer is loaded, not before: learner and engine run without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from hermes_jax.models.config import ModelConfig
from hermes_jax.models.safetensors_io import ModelFolderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Loads `tokenizer.json` with its settings and chat template.

    `AutoTokenizer` would import torch where it is installed, which a trainer on jax can't afford.

    Raises:
        ModelFolderError: the file is missing or unreadable.
    """
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelFolderError(
            f"{file} is missing: copy it from the model's source, or make it there with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the Rust library raises bare exceptions
        raise ModelFolderError(f"the tokenizer in {folder} is unreadable ({error}): copy its files again") from error


def stop_ids(folder: str | Path, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Ids that end a model's turn: those of generation_config.json (else config.json) and the tokenizer's end token."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if given is not None:
            found.update(given if isinstance(given, list) else [given])
            break
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def special_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids that stand for no text: the named special tokens and every added token marked special."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def banned_ids(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> Bool[np.ndarray, " vocab"]:
    """True for rows of the embedding that are no token (padding of the vocabulary): never sampled, probability 0.

    Raises:
        ModelFolderError: the tokenizer has ids beyond the embedding.
    """
    ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    if ids.max() >= config.vocab_size:
        raise ModelFolderError(
            f"the tokenizer has id {ids.max()}, but the model has vocab_size={config.vocab_size}: "
            "tokenizer and model belong to different models"
        )
    banned = np.ones(config.vocab_size, np.bool_)
    banned[ids] = False
    return banned
