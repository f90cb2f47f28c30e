"""Log-probs and entropies of a packed micro-batch: the function that the update differentiates and the scorer runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from hermes_jax.data.packing import PackedBatch
from hermes_jax.models.config import ModelConfig
from hermes_jax.models.head import token_stats
from hermes_jax.models.transformer import forward, head_weight


@dataclass(frozen=True, eq=False)
class ForwardOptions:
    """How the model is run; the update, the scorer of old log-probs and that of the reference share one.

    Args:
        compute_dtype: of the matrix products; norms, softmax, log-probs and gradients are fp32 anyway.
        head_chunk: tokens whose logits exist at once; None = all of a micro-batch.
        remat: recompute each layer in the backward pass; less memory, about a third more work.
        banned: ids that the engine never samples; their probability is 0 here, too.
    """

    compute_dtype: DTypeLike = jnp.float32
    head_chunk: int | None = None
    remat: bool = False
    banned: Bool[Any, " vocab"] | None = None


def token_logprobs(
    params: Any, config: ModelConfig, batch: PackedBatch, options: ForwardOptions
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"]]:
    """(log-prob, entropy) of each token given those before it in its segment, at its own temperature; fp32, nats.

    Both are 0 outside the loss mask, where nothing is computed that the loss does not need.
    `batch` is one micro-batch, `[rows, width]`.
    """
    hidden, _ = forward(
        params,
        config,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        compute_dtype=options.compute_dtype,
        remat=options.remat,
    )
    predicting = jnp.roll(hidden, 1, axis=1)  # the state at t - 1 predicts token t
    return token_stats(
        predicting,
        head_weight(params),
        batch.tokens,
        batch.temperature,
        None if options.banned is None else jnp.asarray(options.banned),
        options.head_chunk,
        batch.loss_mask,
    )
