"""Sampling: the right distribution, never a banned id, a pure function of (seed, index)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from hermes_jax.engines.sampling import (
    FAN_OUT,
    Controls,
    invert_cumulative_sum,
    levels_for,
    sample,
    seed_words,
    truncated,
    uniforms,
)

jitted_sample = jax.jit(sample, static_argnames="truncate")


def controls(rows, *, temperature=1.0, seeds=None, index=0, top_p=1.0, top_k=0, min_p=0.0):
    seeds = range(rows) if seeds is None else seeds
    return Controls(
        temperature=np.full(rows, temperature, np.float32),
        seed=np.array([seed_words(s) for s in seeds], np.uint32),
        index=np.broadcast_to(np.asarray(index, np.int32), rows),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        min_p=np.full(rows, min_p, np.float32),
    )


@partial(jax.jit, static_argnames=("n", "truncate"))
def draw_many(logits, banned, temperature, top_p, top_k, min_p, *, n, truncate=False):
    """n draws from one row of logits: 1,000 seeds at a time, n / 1,000 indices."""
    seeds = jnp.stack([jnp.zeros(1000, jnp.uint32), jnp.arange(1000, dtype=jnp.uint32)], axis=-1)
    rows = jnp.broadcast_to(logits, (1000, logits.shape[-1]))

    def one(index):
        full = Controls(
            jnp.full(1000, temperature),
            seeds,
            jnp.full(1000, index),
            jnp.full(1000, top_p),
            jnp.full(1000, top_k),
            jnp.full(1000, min_p),
        )
        return sample(rows, banned, full, truncate=truncate)[0]

    return jax.lax.map(one, jnp.arange(n // 1000)).reshape(-1)


def draws_of(logits, *, n, banned=None, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, truncate=False):
    logits = jnp.asarray(logits, jnp.float32)
    banned = jnp.zeros(logits.shape[-1], bool) if banned is None else jnp.asarray(banned)
    ids = draw_many(logits, banned, temperature, top_p, top_k, min_p, n=n, truncate=truncate)
    return np.bincount(np.asarray(ids), minlength=logits.shape[-1])


def softmax(logits, banned=None):
    logits = np.asarray(logits, np.float64)
    if banned is not None:
        logits = np.where(banned, -np.inf, logits)
    p = np.exp(logits - logits.max())
    return p / p.sum()


def assert_fits(counts, probs, least=1e-4):
    """Chi-square goodness of fit; ids that are rarer than 5 expected draws are pooled."""
    expected = probs * counts.sum()
    rare = expected < 5
    assert counts[probs == 0].sum() == 0
    pooled_counts, pooled = (
        np.append(counts[~rare], counts[rare].sum()),
        np.append(expected[~rare], expected[rare].sum()),
    )
    keep = pooled > 0
    assert stats.chisquare(pooled_counts[keep], pooled[keep]).pvalue > least


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("vocab", [7, 61, 448])
def test_chi_square_of_sampled_ids(vocab, temperature):
    logits = np.random.default_rng(vocab).normal(0, 1.5, vocab)
    banned = np.arange(vocab) % 5 == 3
    counts = draws_of(logits, n=100_000, banned=banned, temperature=temperature)
    assert_fits(counts, softmax(logits / temperature, banned))


def test_chi_square_needs_the_right_temperature():
    logits = np.random.default_rng(0).normal(0, 1.5, 61)
    with pytest.raises(AssertionError):
        assert_fits(draws_of(logits, n=100_000, temperature=0.95), softmax(logits))


def test_chi_square_over_several_levels_of_the_sum_tree():
    vocab = 3 * FAN_OUT + 11
    logits = np.random.default_rng(1).normal(0, 2.0, vocab)
    assert_fits(draws_of(logits, n=200_000), softmax(logits))


def test_a_long_tail_keeps_its_mass():
    """One id of mass 1 and 4,000 of 1e-8 before and after it: each is lost beside a running sum near 1 in fp32."""
    tail = np.full(2000, np.log(1e-5), np.float32)
    logits = np.concatenate([[0.0], tail, tail - 7])  # tail masses 1e-5 and 1e-8
    counts = draws_of(logits, n=1_000_000)
    probs = softmax(logits)
    for part in (slice(1, 2001), slice(2001, None)):
        expected = probs[part].sum() * 1_000_000
        assert abs(counts[part].sum() - expected) < 5 * np.sqrt(expected)
    assert (counts[1:2001] > 0).mean() > 0.99


def test_a_million_draws_never_give_a_banned_id():
    vocab = 300
    banned = np.ones(vocab, bool)
    banned[[5, 6, 255, 256, 290]] = False
    logits = np.random.default_rng(2).normal(0, 3.0, vocab)
    logits[banned] += 50.0  # the model would like them best
    logits[290] = -40.0
    counts = draws_of(logits, n=1_000_000, banned=banned)
    assert counts.sum() == 1_000_000
    assert counts[banned].sum() == 0


@pytest.mark.parametrize("u", [0.0, 2**-24, 0.5, 1 - 2**-24, 1.0])
@pytest.mark.parametrize("vocab", [9, FAN_OUT, FAN_OUT + 1, 1000])
def test_extreme_draws_stay_on_ids_with_mass(u, vocab):
    """u = 0 must not give a banned first id, u -> 1 neither index V nor a banned last id."""
    rng = np.random.default_rng(3)
    mass = rng.random((64, vocab)).astype(np.float32) * (rng.random((64, vocab)) < 0.3)
    mass[:, [0, -1]] = 0.0
    mass[:, vocab // 2] = 1e-30
    ids = np.asarray(invert_cumulative_sum(jnp.asarray(mass), jnp.full((64, levels_for(vocab)), u)))
    assert (mass[np.arange(64), ids] > 0).all()


def test_logprob_is_that_of_the_sampling_distribution():
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 2.0, (64, 61)).astype(np.float32)
    banned = np.arange(61) >= 50
    for temperature in (1.0, 0.7):
        ids, logprobs = jitted_sample(logits, banned, controls(64, temperature=temperature))
        probs = np.stack([softmax(row / np.float32(temperature), banned) for row in logits])
        np.testing.assert_allclose(logprobs, np.log(probs[np.arange(64), ids]), atol=3e-6)


def test_greedy_takes_the_lowest_index_of_the_maximum():
    logits = np.zeros((4, 600), np.float32)
    logits[1, [599, 70, 300]] = 2.0
    logits[2, 0] = 5.0
    banned = np.arange(600) == 0
    ids, logprobs = jitted_sample(logits, banned, controls(4, temperature=0.0))
    assert ids.tolist() == [1, 70, 1, 1]
    np.testing.assert_allclose(logprobs[0], -np.log(599), rtol=1e-6)


def test_a_row_depends_on_nothing_but_itself():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2.0, (8, 61)).astype(np.float32)
    banned = np.zeros(61, bool)
    order = rng.permutation(8)
    for truncate in (False, True):
        ids, logprobs = jitted_sample(logits, banned, controls(8), truncate=truncate)
        moved = jitted_sample(logits[order], banned, controls(8, seeds=order.tolist()), truncate=truncate)
        assert np.array_equal(ids[order], moved[0])
        assert np.array_equal(logprobs[order], moved[1])


def test_uniforms_are_uniform_and_differ_by_seed_index_and_draw():
    seeds = jnp.stack([jnp.zeros(2000, jnp.uint32), jnp.arange(2000, dtype=jnp.uint32)], axis=-1)
    u = np.stack([np.asarray(uniforms(seeds, jnp.full(2000, i), 2)) for i in range(25)])
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-4
    for a, b in ((u[:-1, :, 0], u[1:, :, 0]), (u[:, :-1, 0], u[:, 1:, 0]), (u[..., 0], u[..., 1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.025


def test_seeds_of_any_size_are_64_bits():
    assert seed_words(5) == (0, 5)
    assert seed_words((7 << 32) + 5) == (7, 5)
    assert seed_words(-1) == (2**32 - 1, 2**32 - 1)
    assert seed_words(2**64 + 3) == (0, 3)
    high = uniforms(np.array([seed_words(1 << 32), seed_words(0)], np.uint32), np.zeros(2, np.int32), 1)
    assert high[0] != high[1]


def reference_truncation(logits, top_p, top_k, min_p):
    """Temperature is done; top-k, top-p of what is left, min-p; by sorting, in float64."""
    order = np.argsort(-logits, kind="stable")
    kept = order[:top_k] if top_k else order
    probs = softmax(logits[kept])
    kept = kept[: int(np.searchsorted(np.cumsum(probs), top_p)) + 1] if top_p < 1 else kept
    probs = softmax(logits)
    return {i for i in kept if probs[i] >= min_p * probs.max()}


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"),
    [(0.9, 0, 0.0), (1.0, 5, 0.0), (1.0, 0, 0.2), (0.5, 7, 0.05), (1.0, 0, 0.0), (1e-6, 0, 0.0), (1.0, 100, 1.0)],
)
def test_truncation_keeps_what_sorting_keeps(top_p, top_k, min_p):
    logits = np.random.default_rng(6).normal(0, 2.0, (32, 61)).astype(np.float32)
    rows = controls(32, top_p=top_p, top_k=top_k, min_p=min_p)
    cut = truncated(jnp.asarray(logits), top_p=rows.top_p, top_k=rows.top_k, min_p=rows.min_p)
    for row, scores in zip(np.asarray(cut), logits, strict=True):
        assert set(np.flatnonzero(np.isfinite(row)).tolist()) == reference_truncation(scores, top_p, top_k, min_p)


def test_truncated_draws_fit_the_renormalised_distribution():
    logits = np.random.default_rng(7).normal(0, 1.0, 40)
    banned = np.arange(40) == int(np.argmax(logits))
    kept = reference_truncation(np.where(banned, -np.inf, logits), 0.8, 0, 0.0)
    cut = np.array([i not in kept for i in range(40)])
    counts = draws_of(logits, n=50_000, banned=banned, top_p=0.8, truncate=True)
    assert_fits(counts, softmax(logits, cut))
