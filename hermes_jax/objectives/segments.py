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

    The order of the additions is fixed, unlike that of a scatter's atomic additions on a GPU.
    """
    return _segment_totals(values, segment_ids)


@jax.jit
def segment_running(
    values: Float[Array, "*rows width"], segment_ids: Int[Array, "*rows width"]
) -> Float[Array, "*rows width"]:
    """Running sum of `values` from the first token of the own segment up to and including each token.

    Sums over 1, 2, 4, ... tokens back are joined in log2(width) rounds of one small loop (no gradient).
    """
    width = segment_ids.shape[-1]
    position = jnp.arange(width)

    def join(round_: Array, sums: Array) -> Array:
        back = 1 << round_
        same = (jnp.roll(segment_ids, back, axis=-1) == segment_ids) & (position >= back)
        return sums + jnp.where(same, jnp.roll(sums, back, axis=-1), 0)

    return lax.fori_loop(0, max(width - 1, 0).bit_length(), join, values)


def _segment_totals(
    values: Float[Array, "*rows width"], segment_ids: Int[Array, "*rows width"]
) -> Float[Array, "*rows width"]:
    ones = jnp.ones_like(segment_ids)
    to_end = jnp.flip(segment_running(ones, jnp.flip(segment_ids, axis=-1)), axis=-1)
    end = jnp.arange(segment_ids.shape[-1]) + to_end - 1
    return jnp.take_along_axis(segment_running(values, segment_ids), end, axis=-1)


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
    """Mean of `values` over the loss tokens of each segment, on every token; 0 for a segment without any."""
    return safe_divide(segment_totals(clean(values, loss_mask), segment_ids), generated_counts(loss_mask, segment_ids))
