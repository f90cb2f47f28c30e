"""hf_models cases to the project's model: loaded by the project's loader, run by the forward that training runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hermes_jax.models import ModelConfig, Params, forward, head_weight, load_model, logits
from hermes_jax.models.config import UnsupportedModelError


def hf_logits(folder: str | Path, input_ids: np.ndarray, lengths: Sequence[int] | None = None) -> np.ndarray:
    """fp32 logits [B, T, V] of the model in `folder`; positions from `lengths` on are padding."""
    try:
        config, params = load_model(folder)
    except UnsupportedModelError as error:
        raise NotImplementedError(str(error)) from error
    tokens = jnp.asarray(input_ids, jnp.int32)
    lengths_b = jnp.asarray([tokens.shape[1]] * tokens.shape[0] if lengths is None else lengths, jnp.int32)
    return np.asarray(_logits(params, config, tokens, lengths_b))


@partial(jax.jit, static_argnums=1)
def _logits(params: Params, config: ModelConfig, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    hidden, _ = forward(params, config, tokens, positions, segments)
    return logits(hidden, head_weight(params))
