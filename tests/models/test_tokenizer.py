"""Tokenizers of model folders: found or named as missing, ids that end a turn, ids that are no token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hermes_jax.models import ModelConfig, ModelFolderError, banned_ids, load_tokenizer, special_ids, stop_ids
from tests.models.conftest import TINY

WORDS = ["<unk>", "one", "two", "three", "user"]
TEMPLATE = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} <e>{% endfor %}"


def write_tokenizer(folder: Path) -> Path:
    """A word tokenizer with two special tokens (ids 5 and 6), an added word (7) and a chat template."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<e>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "<e>"]})
    tokenizer.add_tokens(["plain"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_tokenizer(tmp_path)


def test_the_tokenizer_comes_with_its_template(folder):
    tokenizer = load_tokenizer(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "two one"}], tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "user", "two", "one", "<e>"]


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json is missing.*save_pretrained"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(ModelFolderError, match=rf"tokenizer in {folder} is unreadable"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": [3, 1]}, {"eos_token_id": 2}, {1, 3}),
        ({"eos_token_id": 3}, {}, {3}),
        ({}, {"eos_token_id": 2}, {2}),
        (None, {"eos_token_id": [2, 4]}, {2, 4}),
        ({"eos_token_id": None}, {}, set()),
    ],
)
def test_stop_ids(folder, generation, config, want):
    """generation_config.json wins over config.json; the tokenizer's end token always counts."""
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = load_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<e>")
    assert stop_ids(folder, tokenizer) == tuple(sorted(want | {end}))


def test_special_ids_are_the_named_and_the_marked_ones(folder):
    tokenizer = load_tokenizer(folder)
    assert special_ids(tokenizer) == set(tokenizer.convert_tokens_to_ids(["<unk>", "<s>", "<e>"]))


def test_rows_of_the_embedding_that_are_no_token_are_banned(folder):
    banned = banned_ids(ModelConfig.from_hf(TINY["llama"]), load_tokenizer(folder))
    assert banned.shape == (61,)
    assert np.flatnonzero(~banned).tolist() == list(range(8))


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder):
    config = ModelConfig.from_hf(TINY["llama"] | {"vocab_size": 6})
    with pytest.raises(ModelFolderError, match=r"id 7.*vocab_size=6"):
        banned_ids(config, load_tokenizer(folder))
