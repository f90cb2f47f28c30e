"""Log-probs of a batch under given parameters: the `old` log-probs of a step, and those of the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from hermes_jax.data.packing import PackedBatch
from hermes_jax.learner.batch_function import BatchFunction
from hermes_jax.learner.logprobs import ForwardOptions, token_logprobs
from hermes_jax.learner.mesh import batch_spec
from hermes_jax.models.config import ModelConfig

Score = BatchFunction


def make_score(config: ModelConfig, mesh: Mesh, options: ForwardOptions) -> Score:
    """Builds `score(params, batch) -> (logprobs, entropy)`, `[micro, rows, width]`, both 0 outside the loss mask.

    Same forward, packing, dtype, temperature and banned ids as the update step with the same `options`, so that in the
    first pass over a batch the ratio to these log-probs is 1 up to rounding. `params` are not donated.

    Args:
        config: the model.
        mesh: where `params` lie; rows are spread over its data and fsdp axes.
        options: those of the update step.
    """
    rows = NamedSharding(mesh, batch_spec())

    def one(params: Any, batch: PackedBatch) -> tuple[Array, Array]:
        return token_logprobs(params, config, batch, options)

    def nothing(params: Any, batch: PackedBatch) -> tuple[Array, Array]:
        zeros = jnp.zeros(batch.tokens.shape, jnp.float32)
        return zeros, zeros

    @partial(jax.jit, in_shardings=(None, rows), out_shardings=(rows, rows))
    def score(params: Any, batch: PackedBatch) -> tuple[Array, Array]:
        return jax.lax.map(lambda micro: jax.lax.cond(micro.loss_mask.any(), one, nothing, params, micro), batch)

    return Score(score, mesh)
