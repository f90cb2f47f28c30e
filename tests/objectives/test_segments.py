"""Sums per segment: against a loop, exact, and free of the neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_jax.objectives import gae, place_outcome_reward, segment_totals, soft_overlong_penalty, whiten
from hermes_jax.objectives.segments import segment_ends, segment_starts

WIDTH = 13


@st.composite
def rows(draw) -> tuple[np.ndarray, np.ndarray]:
    """`[2, 3, WIDTH]`: leading axes, too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = np.sort(rng.integers(1, draw(st.integers(2, 7)), (2, 3, WIDTH)), axis=-1).astype(np.int32)
    ids[..., WIDTH - draw(st.integers(0, WIDTH)) :] = 0
    return rng.normal(size=ids.shape).astype(np.float32), ids


@settings(max_examples=20, deadline=None, derandomize=True)
@given(rows())
def test_totals_are_those_of_a_loop_and_their_own_transpose(case):
    values, ids = case
    same = ids[..., :, None] == ids[..., None, :]
    totals = segment_totals(values, ids)
    np.testing.assert_allclose(totals, np.einsum("...ij,...j->...i", same, values), rtol=1e-5, atol=1e-6)
    cotangent = np.cos(np.arange(values.size, dtype=np.float32)).reshape(values.shape)
    (gradient,) = jax.vjp(lambda x: segment_totals(x, ids), values)[1](jnp.asarray(cotangent))
    np.testing.assert_allclose(gradient, np.einsum("...ij,...i->...j", same, cotangent), rtol=1e-5, atol=1e-5)


def test_totals_are_bitwise_the_same_on_each_token_and_free_of_the_neighbours():
    values = np.array([[1e30, 3.3, 0.1, 0.2, 0.7, np.inf, 5.0]], np.float32)
    ids = np.array([[1, 1, 2, 2, 2, 3, 0]], np.int32)
    totals = np.asarray(segment_totals(values, ids))[0]
    assert len(set(totals[2:5].tolist())) == 1
    np.testing.assert_allclose(totals[2], 1.0, rtol=1e-6)
    assert totals[6] == 5.0


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 9, 64, 100])
def test_counts_are_exact_for_every_width(width):
    ids = np.ones((1, width), np.int32)
    assert (np.asarray(segment_totals(np.ones((1, width), np.float32), ids)) == width).all()


def test_starts_and_ends():
    ids = jnp.array([[1, 1, 2, 3, 3, 0, 0]])
    assert np.flatnonzero(segment_starts(ids)).tolist() == [0, 2, 3, 5]
    assert np.flatnonzero(segment_ends(ids)).tolist() == [1, 2, 4, 6]


def test_gae_and_outcome_rewards_stay_in_their_segment():
    """One packed row equals the sequences alone."""
    mask = np.array([[1, 0, 1, 1, 0, 1, 1, 0, 0]], bool)
    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0]], np.int32)
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 1, 9)).astype(np.float32)
    bootstrap = np.where(ids == 1, 0.5, -2.0).astype(np.float32)
    together = gae(rewards, values, bootstrap, mask, ids, gamma=0.9, lam=0.8)
    for here in (slice(0, 4), slice(4, 8)):
        pieces = (rewards[:, here], values[:, here], bootstrap[:, here], mask[:, here], np.ones((1, 4), np.int32))
        alone = gae(*pieces, gamma=0.9, lam=0.8)
        for x, y in zip(together, alone, strict=True):
            np.testing.assert_allclose(x[:, here], y, rtol=1e-6)
    placed = place_outcome_reward(np.where(ids == 1, 7.0, 9.0), mask, ids)
    np.testing.assert_array_equal(placed, [[0, 0, 0, 7, 0, 0, 9, 0, 0]])


def test_whitening_of_fewer_than_two_tokens_is_zero():
    assert (np.asarray(whiten(jnp.array([[3.0, jnp.nan]]), jnp.array([[True, False]]))) == 0).all()


def test_overlong_needs_a_cache_within_the_length():
    with pytest.raises(ValueError, match=r"cache must lie in \[0, max_len=10\] tokens, got 11"):
        soft_overlong_penalty(jnp.array([1]), max_len=10, cache=11)
