"""Tiny models of every built family, as config.json content."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.models import ModelConfig, Params, abstract_params

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2-mixed-windows": {
        **BASE,
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3-tied": {**BASE, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "mistral-window": {**BASE, "model_type": "mistral", "sliding_window": 6},
}


def tiny_model(hf: dict[str, Any], seed: int = 0) -> tuple[ModelConfig, Params]:
    """A model with biases that are not zero and norms that are not one, sharp enough that mistakes show."""
    config, rng = ModelConfig.from_hf(hf), np.random.default_rng(seed)

    def fill(path, leaf) -> np.ndarray:
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return (centre + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return config, jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(fill, abstract_params(config)))


@pytest.fixture(params=TINY)
def tiny(request) -> tuple[ModelConfig, Params]:
    return tiny_model(TINY[request.param])
