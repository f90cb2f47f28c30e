"""Rows of tokens that hold one or several sequences: sums per sequence, counts, clean inputs.

Every array of the objectives is `[..., rows, width]` with `segment_ids` beside it: 1-based within a row, 0 = padding,
a segment's tokens lie together. A padded batch is the special case of one segment per row (`segment_ids` all ones), so
that both layouts run through the same lines. A value per sequence (reward, advantage, bootstrap value) is given on
each token of its segment.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def clean(values: Float[Array, "*rows width"], mask: Bool[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    """`values` in fp32 (or wider) with 0 wherever `mask` is off.

    Must happen before any `exp` or product: a NaN or infinity that is masked afterwards still reaches the gradient as
    `0 * inf`.
    """
    dtype = jnp.promote_types(jnp.result_type(values), jnp.float32)
    return jnp.where(mask, jnp.asarray(values, dtype), 0)


def safe_divide(total: Float[Array, "*shape"], count: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`total / count` for counts and products of counts; `total` (a sum over nothing, so 0) where the count is 0."""
    return total / jnp.maximum(count, 1)


def segment_starts(segment_ids: Int[Array, "*rows width"]) -> Bool[Array, "*rows width"]:
    """True on the first token of each run of equal ids (padding is a run too)."""
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    return jnp.concatenate([jnp.ones_like(changes, shape=(*segment_ids.shape[:-1], 1)), changes], axis=-1)


def segment_ends(segment_ids: Int[Array, "*rows width"]) -> Bool[Array, "*rows width"]:
    """True on the last token of each run of equal ids."""
    return jnp.flip(segment_starts(jnp.flip(segment_ids, axis=-1)), axis=-1)


@jax.custom_vjp
def segment_totals(
    values: Float[Array, "*rows width"], segment_ids: Int[Array, "*rows width"]
) -> Float[Array, "*rows width"]:
    """Sum of `values` over each segment, on every token of that segment (bitwise the same on each).

    A segmented scan: the result does not depend on the order of atomic additions, as a scatter's would on a GPU.
    """
    return _segment_totals(values, segment_ids)


def _segment_totals(
    values: Float[Array, "*rows width"], segment_ids: Int[Array, "*rows width"]
) -> Float[Array, "*rows width"]:
    width = segment_ids.shape[-1]
    axis = segment_ids.ndim - 1  # the scans know no negative axis when reversed
    _, running = lax.associative_scan(_add_unless_new, (segment_starts(segment_ids), values), axis=axis)
    end = jnp.where(segment_ends(segment_ids), jnp.arange(width), width - 1)
    return jnp.take_along_axis(running, lax.cummin(end, axis=axis, reverse=True), axis=-1)


def _add_unless_new(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    (left_starts, left_sum), (right_starts, right_sum) = left, right
    return left_starts | right_starts, jnp.where(right_starts, right_sum, left_sum + right_sum)


def _totals_forward(values: Array, segment_ids: Array) -> tuple[Array, Array]:
    return _segment_totals(values, segment_ids), segment_ids


def _totals_backward(segment_ids: Array, cotangent: Array) -> tuple[Array, None]:
    # "Sum over my segment" is a symmetric matrix, hence its own transpose.
    return _segment_totals(cotangent, segment_ids), None


segment_totals.defvjp(_totals_forward, _totals_backward)


def generated_counts(
    loss_mask: Bool[Array, "*rows width"], segment_ids: Int[Array, "*rows width"]
) -> Float[Array, "*rows width"]:
    """`n_i`: tokens of the loss in each segment, on every token of that segment (fp32, exact up to 2^24)."""
    return segment_totals(loss_mask.astype(jnp.float32), segment_ids)


def segment_means(
    values: Float[Array, "*rows width"], loss_mask: Bool[Array, "*rows width"], segment_ids: Int[Array, "*rows width"]
) -> Float[Array, "*rows width"]:
    """Mean of clean `values` over the loss tokens of each segment, on every token; 0 for a segment without any."""
    return safe_divide(segment_totals(values, segment_ids), generated_counts(loss_mask, segment_ids))
