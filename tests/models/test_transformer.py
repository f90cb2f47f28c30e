"""One forward, many ways: scanned or looped, packed or apart, cached or not, all give the same hidden states.

Every test uses the same few shapes, so that each family compiles each way only once.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.models import KVCache, forward, init_cache, init_params, unstack_layers
from tests.models.conftest import TINY, tiny_model

ATOL = 3e-5
ROWS, TIME, WIDTH = 4, 19, 24

run = jax.jit(forward, static_argnums=1, static_argnames=("compute_dtype", "remat"))


@partial(jax.jit, static_argnums=1, donate_argnums=4)
def cached(params, config, tokens, positions, cache, slots=None):
    return forward(params, config, tokens, positions, cache=cache, slots=slots)


def tokens_for(rows: int = ROWS, time: int = TIME, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, (rows, time)).astype(np.int32)


def positions_for(tokens: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)


def plain(params, config, tokens) -> np.ndarray:
    return np.asarray(run(params, config, tokens, positions_for(tokens))[0])


def packed(sequences: list[np.ndarray], width: int = 27) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, positions, segment_ids) of one row, padded to `width`."""
    row = np.zeros((3, 1, width), np.int32)
    row[0] = 7
    at = 0
    for i, ids in enumerate(sequences):
        row[:, 0, at : at + len(ids)] = ids, np.arange(len(ids)), np.full(len(ids), i + 1)
        at += len(ids)
    return row[0], row[1], row[2]


def prefilled(layers, config, tokens: np.ndarray, lengths: list[int]) -> tuple[np.ndarray, KVCache]:
    """Row b in slot b up to its length, in a cache that an earlier tenant left full of 1e9."""
    cache = jax.tree.map(lambda x: jnp.full_like(x, 1e9), init_cache(config, len(lengths), WIDTH))
    where = np.where(np.arange(tokens.shape[1]) < np.array(lengths)[:, None], positions_for(tokens), WIDTH)
    hidden, cache = cached(layers, config, tokens, where, cache)
    return np.asarray(hidden), cache


def test_loop_equals_scan(tiny):
    config, params = tiny
    tokens = tokens_for()
    np.testing.assert_allclose(plain(unstack_layers(params), config, tokens), plain(params, config, tokens), atol=ATOL)


def test_packed_equals_apart(tiny):
    """Three segments in one row with padding behind: each as if it were alone."""
    config, params = tiny
    tokens, lengths = tokens_for(), [9, 4, 11]
    apart = plain(params, config, tokens)
    want = np.concatenate([apart[row, :n] for row, n in enumerate(lengths)])
    hidden, _ = run(params, config, *packed([tokens[row, :n] for row, n in enumerate(lengths)]))
    np.testing.assert_allclose(hidden[0, : sum(lengths)], want, atol=ATOL)


def test_a_segment_never_sees_another(tiny):
    config, params = tiny
    first, second = tokens_for(2, 8)
    a, b = (np.asarray(run(params, config, *packed([f, second]))[0][0]) for f in (first, (first + 1) % 61))
    np.testing.assert_array_equal(a[8:16], b[8:16])
    assert np.abs(a[:8] - b[:8]).max() > 0.1


def test_a_token_never_sees_the_future(tiny):
    config, params = tiny
    tokens = tokens_for()
    changed = tokens.copy()
    changed[:, 12:] = (changed[:, 12:] + 1) % 61
    a, b = plain(params, config, tokens), plain(params, config, changed)
    np.testing.assert_array_equal(a[:, :12], b[:, :12])
    assert np.abs(a[:, 12:] - b[:, 12:]).max() > 0.1


@pytest.mark.parametrize("name", ["qwen2-mixed-windows", "mistral-window"])
def test_windows_reach_exactly_so_far(name):
    """With one layer, a token sees itself and window - 1 before it."""
    config, params = tiny_model(TINY[name] | {"num_hidden_layers": 1, "max_window_layers": 0})
    (window,) = config.windows
    assert window is not None
    tokens = tokens_for()
    changed = tokens.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 61
    moved = np.abs(plain(params, config, tokens) - plain(params, config, changed))[0].max(axis=-1) > 0
    assert moved.tolist() == [3 <= t < 3 + window for t in range(TIME)]


def test_prefill_in_chunks_and_decode_equal_the_plain_forward(tiny):
    """Slots in any order, left full of 1e9 by an earlier tenant; the last chunk is padded."""
    config, params = tiny
    tokens, slots = tokens_for(), np.array([3, 1])
    layers, at, got = unstack_layers(params), 0, []
    cache = jax.tree.map(lambda x: jnp.full_like(x, 1e9), init_cache(config, 4, WIDTH))
    for real in (6, 6, 3):
        ids, where = np.zeros((2, 6), np.int32), np.full((2, 6), WIDTH, np.int32)
        ids[:, :real], where[:, :real] = tokens[:2, at : at + real], np.arange(at, at + real)
        hidden, cache = cached(layers, config, ids, where, cache, slots)
        got.append(hidden[:, :real])
        at += real
    for t in range(at, TIME):
        ids, where = np.zeros((4, 1), np.int32), np.full((4, 1), WIDTH, np.int32)
        ids[slots, 0], where[slots, 0] = tokens[:2, t], t
        hidden, cache = cached(layers, config, ids, where, cache)
        got.append(hidden[slots])
    np.testing.assert_allclose(np.concatenate(got, axis=1), plain(params, config, tokens)[:2], atol=ATOL)


def test_rows_of_any_length_and_progress_share_a_call(tiny):
    """A prefill of rows of different length, then a decode step with one idle row (position beyond the width)."""
    config, params = tiny
    tokens, lengths = tokens_for(), [2, 9, 14, 0]
    layers, want = unstack_layers(params), plain(params, config, tokens)
    hidden, cache = prefilled(layers, config, tokens, lengths)
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(hidden[row, :n], want[row, :n], atol=ATOL)
    where = np.array([2, 9, 14, WIDTH])[:, None]
    hidden, cache = cached(layers, config, tokens[np.arange(4), lengths][:, None], where, cache)
    for row, n in enumerate(lengths[:3]):
        np.testing.assert_allclose(hidden[row, 0], want[row, n], atol=ATOL)
    assert all(bool((x[3] == 1e9).all()) for x in (*cache.k, *cache.v)), "an idle row wrote into its slot"


def test_other_slots_do_not_change_a_bit(tiny):
    config, params = tiny
    layers, tokens, lengths = unstack_layers(params), tokens_for(), [5, 7, 5, 6]
    outputs = []
    for other in (tokens, np.concatenate([tokens[:1], tokens_for(3, seed=1)])):
        _, cache = prefilled(layers, config, other, lengths)
        outputs.append(cached(layers, config, other[:, :1], np.array(lengths)[:, None], cache)[0])
    np.testing.assert_array_equal(outputs[0][0], outputs[1][0])
    assert np.abs(outputs[0][1] - outputs[1][1]).max() > 1e-3


@pytest.mark.parametrize("slots", [None, (2, 0)])
def test_the_cache_is_updated_in_place(slots):
    """Decode holds no second copy of even one layer's cache; a prefill chunk reads its own slots only."""
    config, params = tiny_model(TINY["llama"])
    cache = init_cache(config, 32, 512)
    ids = np.zeros((32 if slots is None else len(slots), 1), np.int32)
    args = (unstack_layers(params), config, ids, ids, cache, None if slots is None else np.array(slots))
    memory = cached.lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < cache.k[0].nbytes


def test_remat_changes_no_gradient():
    config, params = tiny_model(TINY["qwen2-mixed-windows"])
    tokens = tokens_for()

    def loss(params, remat):
        hidden, _ = forward(params, config, tokens, positions_for(tokens), remat=remat)
        return jnp.sum(jnp.square(hidden - 1))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    for a, b in zip(*(jax.tree.leaves(gradient(params, remat)) for remat in (False, True)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(a).max()))


def test_bf16_compute_keeps_angles_norms_and_softmax_in_fp32():
    """The distance to fp32 is that of bf16 rounding: angles in bf16 would be off by radians at such positions."""
    config, params = tiny_model(TINY["llama"])
    tokens = tokens_for()
    where = positions_for(tokens) + 30_000
    exact, _ = run(params, config, tokens, where)
    half, _ = run(params, config, tokens, where, compute_dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    assert np.abs(half.astype(np.float32) - exact).mean() < 0.02 * np.abs(exact).mean()
    traced = jax.make_jaxpr(lambda: forward(params, config, tokens, where, compute_dtype=jnp.bfloat16)[0])()
    sensitive = [e for e in equations(traced.jaxpr) if e.primitive.name in ("cos", "sin", "rsqrt", "exp")]
    assert len(sensitive) >= 5
    assert {out.aval.dtype for e in sensitive for out in e.outvars} == {jnp.dtype(jnp.float32)}


def equations(jaxpr) -> list:
    """All equations, those of inner jaxprs too."""
    inner = [x for e in jaxpr.eqns for x in jax.tree.leaves(list(e.params.values())) if hasattr(x, "jaxpr")]
    return list(jaxpr.eqns) + [e for x in inner for e in equations(x.jaxpr)]


def test_arguments_that_do_not_go_together():
    config, params = tiny_model(TINY["llama"])
    cache, ids = init_cache(config, 1, 8), np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match="unstack_layers"):
        forward(params, config, ids, ids, cache=cache)
    with pytest.raises(ValueError, match="segment_ids"):
        forward(unstack_layers(params), config, ids, ids, ids, cache=cache)


def test_parameters_follow_the_key_and_the_config():
    config, _ = tiny_model(TINY["llama"])
    draw = jax.jit(partial(init_params, config, dtype=jnp.bfloat16))
    a, b, c = (draw(jax.random.key(seed)) for seed in (0, 0, 1))
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))
    assert not np.array_equal(a["head"]["weight"], c["head"]["weight"])
    layers = a["layers"]["mlp"]["up"]["kernel"]
    assert layers.dtype == jnp.bfloat16
    assert not np.array_equal(layers[0], layers[1]), "layers must not start equal"
    assert "head" not in tiny_model(TINY["qwen3-tied"])[1]
