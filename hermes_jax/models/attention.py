"""Attention: over packed rows (training, scoring) and over the cache (decoding).

Shape letters: B batch, T time (queries), S keys, K key/value heads, G query heads per key/value head, D head dimension;
N blocks of a row, and L tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Window = int | Array | None  # positions that a token sees, itself included; None = all before it

BLOCK = 128
"""Tokens per block, at least."""
MOST_BLOCKS = 16
"""Blocks of a row: each distance between two blocks is a piece of program of its own."""
CACHE_BLOCK = 256
"""Tokens of the cache that a decode step reads at once."""
_MASKED = float(np.finfo(np.float32).min)


class Place(NamedTuple):
    """Where tokens are: position within their sequence, and which sequence of the row (None = one per row)."""

    positions: Int[Array, "*batch time"]
    segments: Int[Array, "*batch time"] | None


def packed_attention(
    q: Float[Array, "batch kv group time dim"],
    k: Float[Array, "batch kv time dim"],
    v: Float[Array, "batch kv time dim"],
    place: Place,
    window: Window,
) -> Float[Array, "batch time heads_dim"]:
    """Attention of packed rows: a token sees its own segment up to itself, at most `window` positions of it.

    Rows of two blocks and more are worked on block by block, without an array of all scores: blocks that lie after the
    queries are left out, and so are those that no query of the call can see, because a segment began or the window
    ended in between. The softmax is that of FlashAttention (arXiv:2205.14135), as is the backward pass.

    Args:
        place: positions count up by one within a segment, and a segment lies in one piece.
    """
    time = q.shape[3]
    blocks = min(time // BLOCK, MOST_BLOCKS)
    if blocks < 2:
        return attend(q, k, v, packed_mask(place, place, window))
    missing = -time % blocks

    def pad(x: Array, axis: int, value: int = 0) -> Array:
        widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=value) if missing else x

    segments = None if place.segments is None else pad(place.segments, 1, -1)
    out = _blockwise(blocks, pad(q, 3), pad(k, 2), pad(v, 2), Place(pad(place.positions, 1), segments), window)
    return out[:, :time]


def attend(
    q: Float[Array, "batch kv group time dim"],
    k: Float[Array, "batch kv keys dim"],
    v: Float[Array, "batch kv keys dim"],
    mask: Bool[Array, "batch time keys"],
) -> Float[Array, "batch time heads_dim"]:
    """Softmax attention; scores and softmax in fp32.

    A masked key has weight exactly 0, so any finite `v` beside it has no influence; its `k` may be anything.
    """
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bksd->btkgd", weights, v)
    return out.reshape(*out.shape[:2], -1)


def attend_one(
    q: Float[Array, "batch kv group dim"],
    k: Float[Array, "batch kv width dim"],
    v: Float[Array, "batch kv width dim"],
    positions: Int[Array, " batch"],
    window: Window,
) -> Float[Array, "batch heads_dim"]:
    """Attention of one query per row over its cache; the cache is read up to the furthest query only.

    Sums of products, because XLA on CPU computes thousands of tiny matrix products one by one. A block that a row does
    not see leaves its result as it is, bit for bit: a row's result does not depend on the rows beside it.

    Args:
        positions: of the queries; the width and more means an idle row, whose result is meaningless.
    """
    batch, kv, group, dim = q.shape
    width = k.shape[2]
    size = width if width <= 2 * CACHE_BLOCK else CACHE_BLOCK
    q = q.astype(jnp.float32) * dim**-0.5

    def block(i: Any, found: _Softmax) -> _Softmax:
        start = jnp.minimum(i * size, width - size)  # the last block may overlap the one before it
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=2).astype(jnp.float32) for x in (k, v))
        index = start + jnp.arange(size)
        mask = _causal(positions[:, None] - index, window) & (index >= i * size)
        scores = (q[:, :, :, None] * keys[:, :, None]).sum(axis=-1)
        scores = jnp.where(mask[:, None, None], scores, _MASKED)
        top = jnp.maximum(found.top, scores.max(axis=-1))
        weights, kept = jnp.exp(scores - top[..., None]), jnp.exp(found.top - top)
        sums = (weights[..., None] * values[:, :, None]).sum(axis=3)
        return _Softmax(top, found.mass * kept + weights.sum(axis=-1), found.values * kept[..., None] + sums)

    nothing = jnp.zeros((batch, kv, group), jnp.float32)
    found = _Softmax(nothing + _MASKED, nothing, jnp.zeros(q.shape, jnp.float32))
    furthest = jnp.where(positions < width, positions, 0).max()
    found = block(0, found) if size == width else jax.lax.fori_loop(0, furthest // size + 1, block, found)
    return (found.values / found.mass[..., None]).reshape(batch, -1)


def packed_mask(queries: Place, keys: Place, window: Window) -> Bool[Array, "*batch queries keys"]:
    """Which keys each query sees: those of its own segment up to itself, at most `window` positions of it."""
    mask = _causal(queries.positions[..., :, None] - keys.positions[..., None, :], window)
    if queries.segments is None or keys.segments is None:
        return mask
    return mask & (queries.segments[..., :, None] == keys.segments[..., None, :])


def cache_mask(positions: Int[Array, "batch time"], width: int, window: Window) -> Bool[Array, "batch time width"]:
    """A query sees the cache entries up to its own position, at most `window` of them."""
    return _causal(positions[:, :, None] - jnp.arange(width), window)


def _causal(distance: Array, window: Window) -> Array:
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


# -- block by block ----------------------------------------------------------------------------------------------------
# All pairs of blocks that lie `apart` blocks from each other are one step: few and large operations.


class _Softmax(NamedTuple):
    """Running softmax of every query: largest score, sum of exp(score - largest), and that sum over values."""

    top: Float[Array, "B K N GL"]
    mass: Float[Array, "B K N GL"]
    values: Float[Array, "B K N GL D"]


class _Rows(NamedTuple):
    """The inputs in blocks; the query heads of a key/value head share one axis with the tokens of a block."""

    q: Float[Array, "B K N GL D"]
    k: Float[Array, "B K N L D"]
    v: Float[Array, "B K N L D"]
    place: Place  # [B, N, L]
    window: Window

    def queries(self, x: Array, apart: int) -> Array:
        """Of the blocks that have one `apart` blocks before them."""
        return x[:, :, apart:]

    def keys(self, x: Array, apart: int) -> Array:
        """Those blocks before them."""
        return x[:, :, : x.shape[2] - apart]

    def mask(self, apart: int) -> Bool[Array, "B 1 N GL L"]:
        queries, keys = self._places(apart)
        mask = packed_mask(queries, keys, self.window)
        return jnp.tile(mask, (1, 1, self.q.shape[3] // mask.shape[2], 1))[:, None]

    def seen(self, apart: int) -> Bool[Array, ""]:
        """Whether any query sees anything so far before it."""
        nearest = (apart - 1) * self.k.shape[3]  # from a block's first query to the last key of the other, less one
        seen = jnp.array(True) if self.window is None else jnp.asarray(self.window) > nearest + 1
        if self.place.segments is None:
            return seen
        return seen & (self.place.positions[:, apart:, 0] > nearest).any()

    def _places(self, apart: int) -> tuple[Place, Place]:
        blocks = self.k.shape[2]
        return (
            jax.tree.map(lambda x: x[:, apart:], self.place),
            jax.tree.map(lambda x: x[:, : blocks - apart], self.place),
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(blocks: int, q: Array, k: Array, v: Array, place: Place, window: Window) -> Array:
    return _forward(blocks, q, k, v, place, window)[0]


def _forward(blocks: int, q: Array, k: Array, v: Array, place: Place, window: Window) -> tuple[Array, Any]:
    rows = _in_blocks(blocks, q, k, v, place, window)
    found = _first(rows)
    for apart in range(1, blocks):
        found = jax.lax.cond(rows.seen(apart), partial(_attend_also, rows, apart), lambda x: x, found)
    values, log_mass = found.values / found.mass[..., None], found.top + jnp.log(found.mass)
    out = _joined(values, q.shape).transpose(0, 3, 1, 2, 4).reshape(q.shape[0], q.shape[3], -1).astype(q.dtype)
    return out, (q, k, v, place, window, values.astype(q.dtype), log_mass)


def _first(rows: _Rows) -> _Softmax:
    """Of each block with itself; every token sees itself, so no sum is 0."""
    scores = jnp.where(rows.mask(0), _dot("bknqd,bknsd->bknqs", rows.q, rows.k), _MASKED)
    top = scores.max(axis=-1)
    weights = jnp.exp(scores - top[..., None])
    values = _dot("bknqs,bknsd->bknqd", weights.astype(rows.v.dtype), rows.v)
    return _Softmax(top, weights.sum(axis=-1), values)


def _attend_also(rows: _Rows, apart: int, found: _Softmax) -> _Softmax:
    """What was found, and what the blocks see of those `apart` blocks before them."""
    q, k, v = rows.queries(rows.q, apart), rows.keys(rows.k, apart), rows.keys(rows.v, apart)
    old = _Softmax(*(rows.queries(x, apart) for x in found))
    scores = jnp.where(rows.mask(apart), _dot("bknqd,bknsd->bknqs", q, k), _MASKED)
    top = jnp.maximum(old.top, scores.max(axis=-1))
    weights, kept = jnp.exp(scores - top[..., None]), jnp.exp(old.top - top)
    new = _Softmax(
        top,
        old.mass * kept + weights.sum(axis=-1),
        old.values * kept[..., None] + _dot("bknqs,bknsd->bknqd", weights.astype(v.dtype), v),
    )
    return _Softmax(*(x.at[:, :, apart:].set(y) for x, y in zip(found, new, strict=True)))


def _backward(blocks: int, saved: Any, d_out: Array) -> tuple[Array, Array, Array, None, None]:
    """d score = p * (d p - sum of d out * out), with the weights p made again from the scores."""
    q, k, v, place, window, values, log_mass = saved
    rows = _in_blocks(blocks, q, k, v, place, window)
    batch, kv, group, time, dim = q.shape
    d_values = _queries_in_blocks(blocks, d_out.reshape(batch, time, kv, group, dim).transpose(0, 2, 3, 1, 4))
    inner = (d_values.astype(jnp.float32) * values).sum(axis=-1)
    step = partial(_step_back, rows, d_values, inner, log_mass)
    grads = step(0, tuple(jnp.zeros(x.shape, jnp.float32) for x in rows[:3]))
    for apart in range(1, blocks):
        grads = jax.lax.cond(rows.seen(apart), partial(step, apart), lambda x: x, grads)
    d_q = _joined(grads[0] * dim**-0.5, q.shape).astype(q.dtype)
    d_k, d_v = (x.reshape(k.shape).astype(k.dtype) for x in grads[1:])
    return d_q, d_k, d_v, None, None


_Grads = tuple[Array, ...]


def _step_back(rows: _Rows, d_values: Array, inner: Array, log_mass: Array, apart: int, grads: _Grads) -> _Grads:
    q, k, v = rows.queries(rows.q, apart), rows.keys(rows.k, apart), rows.keys(rows.v, apart)
    d_out, inner, log_mass = (rows.queries(x, apart) for x in (d_values, inner, log_mass))
    weights = jnp.exp(_dot("bknqd,bknsd->bknqs", q, k) - log_mass[..., None])
    weights = jnp.where(rows.mask(apart), weights, 0.0)
    d_scores = weights * (_dot("bknqd,bknsd->bknqs", d_out, v) - inner[..., None])
    weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
    d_q, d_k, d_v = grads
    last = d_k.shape[2] - apart
    return (
        d_q.at[:, :, apart:].add(_dot("bknqs,bknsd->bknqd", d_scores, k)),
        d_k.at[:, :, :last].add(_dot("bknqs,bknqd->bknsd", d_scores, q)),
        d_v.at[:, :, :last].add(_dot("bknqs,bknqd->bknsd", weights, d_out)),
    )


_blockwise.defvjp(_forward, _backward)

_dot: Callable[..., Array] = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _in_blocks(blocks: int, q: Array, k: Array, v: Array, place: Place, window: Window) -> _Rows:
    batch, kv, time, dim = k.shape
    shape = (batch, kv, blocks, time // blocks, dim)
    q = _queries_in_blocks(blocks, q * dim**-0.5)
    in_blocks = jax.tree.map(lambda x: x.reshape(batch, blocks, -1), place)
    return _Rows(q, k.reshape(shape), v.reshape(shape), in_blocks, window)


def _queries_in_blocks(blocks: int, x: Float[Array, "B K G T D"]) -> Float[Array, "B K N GL D"]:
    batch, kv, group, _, dim = x.shape
    return x.reshape(batch, kv, group, blocks, -1, dim).swapaxes(2, 3).reshape(batch, kv, blocks, -1, dim)


def _joined(x: Float[Array, "B K N GL D"], shape: tuple[int, ...]) -> Float[Array, "B K G T D"]:
    """Undoes `_queries_in_blocks`."""
    batch, kv, group, _, dim = shape
    return x.reshape(batch, kv, x.shape[2], group, -1, dim).swapaxes(2, 3).reshape(shape)
