"""Log-probs of a batch under given parameters: the `old` log-probs of a step, and those of the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from hermes_jax.data.packing import PackedBatch
from hermes_jax.learner.logprobs import ForwardOptions, token_logprobs
from hermes_jax.learner.mesh import batch_spec, check_rows, row_shards
from hermes_jax.models.config import ModelConfig

Score = Callable[[Any, PackedBatch], tuple[Float[Array, "micro rows width"], Float[Array, "micro rows width"]]]


def make_score(config: ModelConfig, mesh: Mesh, options: ForwardOptions) -> Score:
    """Builds `score(params, batch) -> (logprobs, entropy)`, both 0 outside the loss mask.

    Same forward, packing, dtype, temperature and banned ids as the update step with the same `options`, so that in the
    first pass over a batch the ratio to these log-probs is 1 up to rounding. `params` are not donated.

    Args:
        config: the model.
        mesh: where `params` lie; rows are spread over its data and fsdp axes.
        options: those of the update step.
    """
    rows = NamedSharding(mesh, batch_spec())
    shards = row_shards(mesh)

    def one(params: Any, batch: PackedBatch) -> tuple[Array, Array]:
        stats = token_logprobs(params, config, batch, options, shards=shards)
        logprobs, entropy = (jnp.where(batch.loss_mask, x, 0.0) for x in stats)
        return logprobs, entropy

    @partial(jax.jit, in_shardings=(None, rows), out_shardings=(rows, rows))
    def score(params: Any, batch: PackedBatch) -> tuple[Array, Array]:
        check_rows(batch.tokens.shape, mesh)
        return jax.lax.map(lambda micro: one(params, micro), batch)

    return score
