"""Sampling on the device: pure functions of logits and of a counter; no generator state anywhere.

Every row is computed from its own logits, controls and counter alone, so that a reply depends neither on the rows
beside it nor on the slot it lies in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

FAN_OUT = 256
"""Children per node of the sum tree: a running sum of so few fp32 terms loses no mass that a test could see."""


class Controls(NamedTuple):
    """How each row is sampled; one entry per row (numpy on the host, jax on the device).

    Args:
        temperature: divides the logits; 0 = greedy.
        seed: 64 bits as two words.
        index: number of the token in its reply, from 0: the counter.
        top_p, top_k, min_p: truncations (1, 0, 0 = off); read only when the call is compiled for truncation.
    """

    temperature: Float[Any, " row"]
    seed: UInt32[Any, "row 2"]
    index: Int[Any, " row"]
    top_p: Float[Any, " row"]
    top_k: Int[Any, " row"]
    min_p: Float[Any, " row"]


def seed_words(seed: int) -> tuple[int, int]:
    """The low 64 bits of any Python integer as two 32-bit words (high, low)."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def sample(
    logits: Float[Array, "row vocab"],
    banned: Bool[Array, " vocab"],
    controls: Controls,
    *,
    truncate: bool = False,
) -> tuple[Int[Array, " row"], Float[Array, " row"]]:
    """Samples one id per row; returns the ids and their log-probs (nats) under the distribution they came from.

    Banned ids have probability 0. Temperature is applied first, then (if `truncate`) top-k, top-p, min-p. A greedy
    row takes the lowest index of the maximum; its log-prob is that of temperature 1.
    """
    greedy = controls.temperature <= 0
    scale = jnp.where(greedy, 1.0, controls.temperature)[:, None]
    scores = jnp.where(banned, -jnp.inf, logits.astype(jnp.float32) / scale)
    if truncate:
        scores = truncated(scores, top_p=controls.top_p, top_k=controls.top_k, min_p=controls.min_p)
    top = scores.max(axis=-1, keepdims=True)
    mass = jnp.exp(scores - top)
    draws = uniforms(controls.seed, controls.index, levels_for(scores.shape[-1]))
    ids = jnp.where(greedy, jnp.argmax(scores, axis=-1), invert_cumulative_sum(mass, draws)).astype(jnp.int32)
    chosen = jnp.take_along_axis(scores, ids[:, None], axis=-1) - top
    return ids, chosen[:, 0] - jnp.log(mass.sum(axis=-1))


def uniforms(seed: UInt32[Array, "row 2"], index: Int[Array, " row"], draws: int) -> Float[Array, "row draws"]:
    """`draws` numbers in [0, 1) for each row: a pure function of (seed, index), by Threefry-2x32."""

    def one(words: Array, counter: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, counter), (draws,))

    return jax.vmap(one)(jnp.asarray(seed), jnp.asarray(index))


def levels_for(vocab: int) -> int:
    """Levels of the sum tree over `vocab` ids, which is also the number of draws that one token needs."""
    levels, reach = 1, FAN_OUT
    while reach < vocab:
        levels, reach = levels + 1, reach * FAN_OUT
    return levels


def invert_cumulative_sum(mass: Float[Array, "row vocab"], draws: Float[Array, "row levels"]) -> Int[Array, " row"]:
    """Draws an id in proportion to its mass (not normalised, at least one positive per row).

    One running sum over a whole vocabulary would lose a long tail: 1 + 1e-9 is 1 in fp32. So the ids are the leaves of
    a tree of sums; each level inverts the cumulative sum of at most FAN_OUT children with a draw of its own.
    """
    levels = [mass]
    while levels[-1].shape[-1] > FAN_OUT:
        levels.append(_blocks(levels[-1]).sum(axis=-1))
    index = _pick(levels[-1], draws[:, 0])
    for level, masses in enumerate(reversed(levels[:-1]), start=1):
        children = jnp.take_along_axis(_blocks(masses), index[:, None, None], axis=1)[:, 0]
        index = index * FAN_OUT + _pick(children, draws[:, level])
    return index


def _blocks(mass: Float[Array, "row n"]) -> Float[Array, "row block child"]:
    padding = -mass.shape[-1] % FAN_OUT
    return jnp.pad(mass, ((0, 0), (0, padding))).reshape(mass.shape[0], -1, FAN_OUT)


def _pick(mass: Float[Array, "row n"], u: Float[Array, " row"]) -> Int[Array, " row"]:
    """First index whose cumulative sum exceeds `u` times the total.

    Rounding can put that target at (or beyond) the total, and `u = 0` at the very start: an index without mass is
    never taken, and beyond the end it is the last one with mass.
    """
    size = mass.shape[-1]
    # A product with a triangle of ones is a cumulative sum in one operation; HIGHEST keeps it fp32 on accelerators.
    triangle = jnp.triu(jnp.ones((size, size), mass.dtype))
    cumulative = jnp.matmul(mass, triangle, precision=jax.lax.Precision.HIGHEST)
    has_mass = mass > 0
    beyond = (cumulative > (u * cumulative[:, -1])[:, None]) & has_mass
    last = size - 1 - jnp.argmax(has_mass[:, ::-1], axis=-1)
    return jnp.where(beyond.any(axis=-1), jnp.argmax(beyond, axis=-1), last)


def truncated(
    scores: Float[Array, "row vocab"],
    *,
    top_p: Float[Array, " row"],
    top_k: Int[Array, " row"],
    min_p: Float[Array, " row"],
) -> Float[Array, "row vocab"]:
    """Sets to -inf what top-k, then top-p (of what top-k left), then min-p cut off.

    top-p keeps the smallest set of likeliest ids whose mass reaches `top_p`; min-p keeps ids of at least `min_p` times
    the likeliest one's probability (arXiv:2407.01082). Ids that tie with the last one kept are kept too.
    """
    vocab = scores.shape[-1]
    ranked = -jnp.sort(-scores, axis=-1)
    limit = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    ranked = jnp.where(jnp.arange(vocab) < limit[:, None], ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    kept = (ranked > -jnp.inf) & ((before < top_p[:, None]) | (top_p >= 1.0)[:, None])
    kept &= ranked >= ranked[:, :1] + jnp.log(min_p)[:, None]
    lowest = jnp.where(kept, ranked, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(scores >= lowest, scores, -jnp.inf)
