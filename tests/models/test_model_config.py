"""config.json to ModelConfig: the families' own defaults, old and new keys, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hermes_jax.models import ModelConfig, UnsupportedModelError
from hermes_jax.models.rope import inverse_frequencies
from tests.models.conftest import BASE, TINY


def config(**changes) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, "model_type": "llama"} | changes)


def test_equal_files_give_equal_hashable_configs():
    assert {ModelConfig.from_hf(TINY["llama"]), ModelConfig.from_hf(dict(TINY["llama"]))} == {
        config(attention_bias=True, mlp_bias=True)
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_absent_keys_mean_what_they_mean_in_transformers(family):
    bare = {"model_type": family, "num_attention_heads": 32}
    bare |= {key: BASE[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    bare["hidden_size"] = 512
    ours, theirs = ModelConfig.from_hf(bare), AutoConfig.for_model(**bare)
    assert ours.n_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // 32)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_length == theirs.max_position_embeddings
    assert set(ours.windows) == {theirs.sliding_window if family == "mistral" else None}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize(
    "rope",
    [
        {"kind": "linear", "factor": 4.0},
        {
            "kind": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "kind": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.3,
        },
        {"kind": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    ],
    ids=lambda rope: "-".join(map(str, rope.values())),
)
def test_frequencies_equal_those_of_transformers(rope, key, kind_key):  # fmt: skip
    rope = dict(rope)
    kind = rope.pop("kind")
    hf = {**BASE, "model_type": "llama", "head_dim": 64, "rope_theta": 50_000.0, key: {kind_key: kind, **rope}}
    ours = ModelConfig.from_hf(hf).rope
    want, factor = ROPE_INIT_FUNCTIONS[kind](AutoConfig.for_model(**hf), "cpu")
    assert ours.theta == 50_000.0
    np.testing.assert_allclose(inverse_frequencies(ours, 64), want.numpy(), rtol=1e-6)
    assert ours.attention_factor == pytest.approx(factor)


def test_rope_theta_inside_rope_parameters_wins():
    assert config(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 7e5}).rope.theta == 7e5


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 6}, (6, 6)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 6}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}, (None, 6)),
        ({"model_type": "qwen3", "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0,
          "layer_types": ["sliding_attention", "full_attention"]}, (6, None)),
        ({"model_type": "llama", "sliding_window": 6}, (None, None)),
    ],
)  # fmt: skip
def test_windows(changes, windows):
    assert config(**changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, ["model_type='mamba'", "llama", "qwen3"]),
        ({"model_type": None}, ["model_type=None"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, ["rope_scaling", "longrope", "yarn"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, ["rope_parameters", "dynamic"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["rope_parameters", "full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "1.0"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "bfloat16"]),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention", "mamba"]},
         ["layer_types", "mamba"]),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModelError) as caught:
        config(**changes)
    assert all(word in str(caught.value) for word in ["config.json", *words])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size missing"),
        ({"vocab_size": "many"}, "vocab_size missing or no positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers missing or no positive integer"),
        ({"max_position_embeddings": None}, "max_position_embeddings missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of type linear needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "needs low_freq_factor, high_freq_factor"),
    ],
)
def test_senseless_configs_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        config(**changes)
