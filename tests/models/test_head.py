"""The chunked head against float64 numpy and against the gradient of the plain formula."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.models import logits, token_stats

N, H, V, ALLOWED = 23, 16, 50, 41


@pytest.fixture
def case() -> dict:
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(size=(N, H)).astype(np.float32),
        "weight": rng.normal(size=(V, H)).astype(np.float32),
        "targets": rng.integers(0, ALLOWED, N).astype(np.int32),
        "temperature": rng.uniform(0.4, 1.6, N).astype(np.float32),
        "banned": np.arange(V) >= ALLOWED,
        "cotangents": rng.normal(size=(2, N)).astype(np.float32),
    }


def exact(case: dict, hidden=None) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies in float64, banned ids cut away."""
    hidden = (case["hidden"] if hidden is None else hidden).astype(np.float64)
    z = (hidden @ case["weight"].astype(np.float64).T)[:, :ALLOWED] / case["temperature"][:, None].astype(np.float64)
    logp = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
    return logp[np.arange(len(z)), case["targets"]], -(np.exp(logp) * logp).sum(axis=1)


def stats(case: dict, chunk: int | None, hidden=None, weight=None):
    return token_stats(
        case["hidden"] if hidden is None else hidden,
        case["weight"] if weight is None else weight,
        case["targets"],
        case["temperature"],
        case["banned"],
        chunk,
    )


@pytest.mark.parametrize("chunk", [None, 1, 6, 23, 1000])
def test_values_equal_float64(case, chunk):
    for got, want in zip(jax.jit(partial(stats, case, chunk))(), exact(case), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (1, 1)], ids=["logprob", "entropy", "both"])
def test_gradients_equal_those_of_the_plain_formula(case, chunk, weights):
    a, b = (w * c for w, c in zip(weights, case["cotangents"], strict=True))

    def plain(hidden, weight):
        logp = jax.nn.log_softmax((hidden @ weight.T)[:, :ALLOWED] / case["temperature"][:, None])
        picked = jnp.take_along_axis(logp, case["targets"][:, None], axis=1)[:, 0]
        return jnp.sum(a * picked - b * jnp.sum(jnp.exp(logp) * logp, axis=1))

    def ours(hidden, weight):
        logprobs, entropy = stats(case, chunk, hidden, weight)
        return jnp.sum(a * logprobs + b * entropy)

    got, want = (jax.jit(jax.grad(f, (0, 1)))(case["hidden"], case["weight"]) for f in (ours, plain))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * float(jnp.abs(y).max()))
    assert not np.asarray(got[1][ALLOWED:]).any(), "a banned id has a gradient"


def test_chunks_change_nothing(case):
    a, b = (np.stack(stats(case, chunk)) for chunk in (None, 5))
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_large_logits_neither_overflow_nor_cancel(case):
    """Logits near 3e4 lose the entropy if it is formed as logsumexp minus the mean logit."""
    rows = case["hidden"] * 3e-4
    hidden = np.concatenate([rows, np.ones((N, 1), np.float32)], axis=1)
    weight = np.concatenate([case["weight"], np.full((V, 1), 3e4, np.float32)], axis=1)
    shifted = case | {"weight": weight}
    with np.errstate(over="raise"):
        want = exact(shifted, hidden)
    got = stats(shifted, 6, hidden, weight)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4)
    hot = stats(case, 6, case["hidden"] * 1e4)
    assert np.isfinite(np.stack(hot)).all()
    gradient = jax.grad(lambda h: sum(x.sum() for x in stats(case, 6, h)))(case["hidden"] * 1e4)
    assert np.isfinite(gradient).all()


def test_banned_ids_are_masked_alike_for_engine_and_learner(case):
    z = logits(case["hidden"], case["weight"], case["banned"])
    assert np.isneginf(z[:, ALLOWED:]).all()
    logp = jax.nn.log_softmax(z / case["temperature"][:, None])
    picked = logp[np.arange(N), case["targets"]]
    np.testing.assert_allclose(stats(case, 6)[0], picked, atol=2e-6)
    banned_target = case | {"targets": np.full(N, V - 1)}
    assert np.isneginf(stats(banned_target, 6)[0]).all()


def test_one_allowed_id_has_probability_one(case):
    only = case | {"banned": np.arange(V) != 3, "targets": np.full(N, 3)}
    logprobs, entropy = stats(only, None)
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)
    np.testing.assert_allclose(entropy, 0, atol=1e-6)


def test_bf16_hidden_states_still_sum_in_fp32(case):
    hidden = jnp.asarray(case["hidden"], jnp.bfloat16)
    got = stats(case, 6, hidden)
    want = exact(
        case | {"weight": np.asarray(jnp.asarray(case["weight"], jnp.bfloat16), np.float32)}, np.asarray(hidden)
    )
    np.testing.assert_allclose(got, np.stack(want), rtol=1e-5, atol=1e-5)
    d_hidden, d_weight = jax.grad(lambda h, w: stats(case, 6, h, w)[0].sum(), (0, 1))(hidden, case["weight"])
    assert (d_hidden.dtype, d_weight.dtype) == (jnp.bfloat16, jnp.float32)


def test_no_array_of_tokens_times_vocabulary_exists():
    """Temporary memory of value and gradient together stays near that of one chunk."""
    tokens, hidden, vocab, chunk = 16384, 32, 8192, 128
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((tokens, hidden), "f4"), ((vocab, hidden), "f4"))]
    ints, floats = jax.ShapeDtypeStruct((tokens,), "i4"), jax.ShapeDtypeStruct((tokens,), "f4")

    def loss(h, w, targets, temperature, chunk):
        logprobs, entropy = token_stats(h, w, targets, temperature, None, chunk)
        return jnp.sum(logprobs + 0.1 * entropy)

    def temporary(chunk: int | None) -> int:
        gradient = jax.jit(jax.value_and_grad(partial(loss, chunk=chunk), (0, 1)))
        return gradient.lower(*shapes, ints, floats).compile().memory_analysis().temp_size_in_bytes

    full = tokens * vocab * 4
    assert temporary(chunk) < full / 20
    assert temporary(None) >= full, "the comparison must be able to fail"


@pytest.mark.parametrize("chunk", [None, 4, 7, 40])
def test_only_wanted_tokens_are_computed(case, chunk):
    """Rows with many, few and no wanted tokens: values and gradients are those of the wanted tokens alone."""
    rng = np.random.default_rng(1)
    rows = {name: np.stack([case[name]] * 3) for name in ("hidden", "targets", "temperature")}
    wanted = rng.random((3, N)) < np.array([[0.7], [0.2], [0.0]])
    cotangents = rng.normal(size=(2, 3, N)).astype(np.float32)

    def ours(hidden, weight):
        return token_stats(hidden, weight, rows["targets"], rows["temperature"], case["banned"], chunk, wanted)

    def chosen(hidden, weight):
        picked = (rows[name][wanted] for name in ("targets", "temperature"))
        return token_stats(hidden[wanted], weight, *picked, case["banned"])

    values, pull = jax.vjp(ours, rows["hidden"], case["weight"])
    expected, pull_expected = jax.vjp(chosen, rows["hidden"], case["weight"])
    for value, want in zip(values, expected, strict=True):
        np.testing.assert_allclose(value[wanted], want, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(value[~wanted], 0)
    gradients = zip(pull(tuple(cotangents)), pull_expected(tuple(cotangents[:, wanted])), strict=True)
    for gradient, want in gradients:
        np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5)


def test_chunks_without_wanted_tokens_are_left_out(case):
    """Hidden states that are not numbers there would show in the gradient of the weight: 0 * nan is not 0."""
    wanted = np.zeros(N, bool)
    wanted[[3, 11, 17]] = True
    hidden = np.where(np.arange(N)[:, None] >= 18, np.nan, case["hidden"])

    def total(weight):
        return token_stats(hidden, weight, case["targets"], case["temperature"], None, 6, wanted)[0].sum()

    assert np.isfinite(jax.grad(total)(case["weight"])).all()
    hidden[0] = np.nan  # beside the wanted ones in the one chunk that is worked on
    assert not np.isfinite(jax.grad(total)(case["weight"])).all()
