"""Blockwise attention against the plain one: values, gradients, and what it leaves out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_jax.models import attention
from hermes_jax.models.attention import (
    BLOCK,
    CACHE_BLOCK,
    MOST_BLOCKS,
    Place,
    attend,
    attend_one,
    cache_mask,
    packed_attention,
    packed_mask,
)

KV, GROUP, DIM = 2, 3, 8


def place_of(rows: list[list[int]], width: int) -> Place:
    """Rows of segments of these lengths, the rest padding."""
    positions, segments = np.zeros((2, len(rows), width), np.int32)
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths, start=1):
            positions[row, start : start + length] = np.arange(length)
            segments[row, start : start + length] = number
            start += length
    return Place(jnp.asarray(positions), jnp.asarray(segments))


def inputs(batch: int, width: int, seed: int = 0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (batch, KV, GROUP, width, DIM), (batch, KV, width, DIM), (batch, KV, width, DIM), (batch, width, 48)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def results(function, place: Place, q, k, v, d_out):
    """Output and gradients where there are tokens."""
    real = jnp.ones(d_out.shape[:2], bool) if place.segments is None else place.segments > 0
    out, pull = jax.vjp(lambda q, k, v: jnp.where(real[..., None], function(q, k, v), 0.0), q, k, v)
    return out, *pull(d_out)


@jax.jit
def blockwise(place, window, q, k, v, d_out):
    return results(lambda q, k, v: packed_attention(q, k, v, place, window), place, q, k, v, d_out)


@jax.jit
def plain(place, window, q, k, v, d_out):
    return results(lambda q, k, v: attend(q, k, v, packed_mask(place, place, window)), place, q, k, v, d_out)


def lengths_within(width: int):
    def cut(parts: list[int]) -> list[int]:
        kept, left = [], width
        for part in parts:
            if part <= left:
                kept.append(part)
                left -= part
        return kept

    return st.lists(st.integers(1, width), max_size=6).map(cut)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.sampled_from([2 * BLOCK, 2 * BLOCK + 45, 5 * BLOCK - 1]), seed=st.integers(0, 99))
def test_any_packing_gives_the_values_and_gradients_of_plain_attention(data, width, seed):
    rows = data.draw(st.lists(lengths_within(width), min_size=2, max_size=2))
    window = data.draw(st.sampled_from([2**30, 1, 37, BLOCK, BLOCK + 1, 2 * BLOCK + 7]))
    arrays = inputs(2, width, seed)
    place = place_of(rows, width)
    for ours, reference in zip(blockwise(place, window, *arrays), plain(place, window, *arrays), strict=True):
        np.testing.assert_allclose(ours, reference, atol=2e-5)


@pytest.mark.parametrize("window", [None, 200])
def test_one_sequence_per_row(window):
    arrays = inputs(1, 3 * BLOCK)
    place = Place(jnp.arange(3 * BLOCK)[None], None)
    for ours, reference in zip(blockwise(place, window, *arrays), plain(place, window, *arrays), strict=True):
        np.testing.assert_allclose(ours, reference, atol=2e-5)


def test_float64_formula():
    """softmax(q k / sqrt(D)) v, written out."""
    width = 2 * BLOCK + 3
    q, k, v, _ = (np.asarray(x, np.float64) for x in inputs(1, width))
    place = place_of([[width - 90, 80]], width)
    segments, positions = np.asarray(place.segments)[0], np.asarray(place.positions)[0]
    scores = np.einsum("kgtd,ksd->kgts", q[0], k[0]) / np.sqrt(DIM)
    sees = (segments[:, None] == segments) & (positions[:, None] >= positions)
    weights = np.where(sees, np.exp(scores), 0)
    expected = np.einsum("kgts,ksd->tkgd", weights / weights.sum(-1, keepdims=True), v[0]).reshape(width, -1)
    ours = packed_attention(*inputs(1, width)[:3], place, None)[0]
    np.testing.assert_allclose(ours[: width - 10], expected[: width - 10], atol=1e-5)


def test_bfloat16_stays_close_and_keeps_its_dtype():
    width = 4 * BLOCK
    place, arrays = place_of([[300, 212]], width), inputs(1, width, dtype=jnp.bfloat16)
    exact = plain(place, None, *(x.astype(jnp.float32) for x in arrays))
    for ours, reference in zip(blockwise(place, None, *arrays), exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        assert jnp.abs(ours.astype(jnp.float32) - reference).max() < 0.02 * jnp.abs(reference).max()


def test_blocks_that_no_query_sees_are_left_out():
    """Infinite values there would show: 0 * inf is not a number."""
    width = 6 * BLOCK
    place = place_of([[3 * BLOCK, 3 * BLOCK]], width)
    q, k, v = inputs(1, width)[:3]
    v = v.at[:, :, :BLOCK].set(jnp.inf)
    out = packed_attention(q, k, v, place, None)
    assert jnp.isfinite(out[:, 3 * BLOCK :]).all()
    assert not jnp.isfinite(out[:, 2 * BLOCK : 3 * BLOCK]).any()
    out = packed_attention(q, k, v, Place(jnp.arange(width)[None], None), BLOCK)
    assert jnp.isfinite(out[:, 2 * BLOCK :]).all()


def test_the_other_row_of_a_call_changes_no_bit():
    """A long neighbour makes the call work on more blocks; for a short segment these weigh nothing."""
    width = 4 * BLOCK
    q, k, v, d_out = inputs(2, width)
    short, long = [100, 90, 100, 90, 100], [width]
    beside = [blockwise(place_of([short, other], width), None, q, k, v, d_out) for other in (short, long)]
    for a, b in zip(*beside, strict=True):
        np.testing.assert_array_equal(a[0], b[0])


def test_no_array_of_all_scores_exists():
    width = 16 * BLOCK
    place = place_of([[width]], width)
    compiled = jax.jit(blockwise).lower(place, None, *inputs(1, width)).compile()
    scores = KV * GROUP * width * width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < scores


def test_very_long_rows_have_few_larger_blocks(monkeypatch):
    seen = []
    monkeypatch.setattr(
        attention, "_blockwise", lambda blocks, q, *_: seen.append(blocks) or jnp.zeros((1, q.shape[3], 48))
    )
    for width in (BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 40 * BLOCK):
        out = packed_attention(*inputs(1, width)[:3], Place(jnp.arange(width)[None], None), None)
        assert out.shape == (1, width, 48)
    assert seen == [2, MOST_BLOCKS]


# -- decoding ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data(), width=st.sampled_from([5, 2 * CACHE_BLOCK, 2 * CACHE_BLOCK + 1, 5 * CACHE_BLOCK + 100]))
def test_one_query_per_row_sees_what_plain_attention_sees(data, width):
    positions = np.array(data.draw(st.lists(st.integers(0, width - 1), min_size=4, max_size=4)), np.int32)
    window = data.draw(st.sampled_from([None, 1, 100, CACHE_BLOCK + 3]))
    q, k, v, _ = inputs(4, width, seed=width)
    q = q[:, :, :, :1]
    expected = attend(q, k, v, cache_mask(positions[:, None], width, window))[:, 0]
    np.testing.assert_allclose(attend_one(q[:, :, :, 0], k, v, positions, window), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 70])
def test_the_rows_beside_it_change_no_bit_of_a_row(window):
    """They decide how far the cache is read, and an idle row (position = width) does not."""
    width = 4 * CACHE_BLOCK + 10
    q, k, v, _ = inputs(4, width)
    run = jax.jit(lambda positions: attend_one(q[:, :, :, 0], k, v, positions, window))
    results = [run(jnp.array([90, 300, *others])) for others in ([0, 0], [width - 1, 5], [width, width])]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0][:2], other[:2])


def test_the_cache_beyond_the_furthest_query_is_not_read():
    """Infinite values there would show: 0 * inf is not a number."""
    width = 3 * CACHE_BLOCK
    q, k, v, _ = inputs(3, width)
    v = v.at[:, :, 2 * CACHE_BLOCK :].set(jnp.inf)
    run = jax.jit(lambda positions: attend_one(q[:, :, :, 0], k, v, positions, None))
    assert jnp.isfinite(run(jnp.array([2 * CACHE_BLOCK - 1, 0, width]))).all()
    assert not jnp.isfinite(run(jnp.array([2 * CACHE_BLOCK, 0, width]))).all()
