"""Surrogate losses, worked out by hand: values, branches and edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.objectives import (
    clip_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    kl_estimate,
    kl_on_host,
    reinforce_loss,
    sapo_loss,
)
from hermes_jax.objectives.policy import guard

ADVANTAGES = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 0.0])
RATIOS = jnp.array([0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 5.0, 9.0])


def clip_sum(logprobs: jax.Array, **options) -> tuple[jax.Array, jax.Array]:
    options = {"clip_low": 0.2, "clip_high": 0.5, "dual_clip": 3.0} | options
    loss = clip_loss(logprobs, jnp.zeros_like(logprobs), ADVANTAGES, **options).loss
    return loss.sum(), loss


def test_clip_branch_by_branch():
    gradient, loss = jax.grad(clip_sum, has_aux=True)(jnp.log(RATIOS))
    np.testing.assert_allclose(loss, [-0.5, -1.0, -1.5, 0.8, 1.0, 2.0, 3.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.5, -1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0], rtol=1e-6, atol=0)


def test_two_sided_clipping_is_the_dual_clip():
    ratio, advantage = np.meshgrid(np.linspace(0.1, 6, 60), [-2.0, -0.5, 0.0, 0.5, 2.0])
    delta = 3.0
    two_sided = -np.minimum(np.minimum(ratio, delta) * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": delta}
    loss = clip_loss(jnp.log(ratio), jnp.zeros_like(ratio), jnp.asarray(advantage), **options).loss
    np.testing.assert_allclose(loss, two_sided, rtol=1e-5)


def test_dppo_masks_by_probability_and_not_by_ratio():
    old = jnp.log(jnp.array([0.01, 0.5, 0.5, 0.5, 0.5]))
    new = jnp.log(jnp.array([0.05, 0.8, 0.8, 0.2, 0.2]))
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0, 1.0])
    result = dppo_loss(new, old, advantages, tv_max=0.15)
    np.testing.assert_allclose(result.loss, [-5.0, 0.0, 1.6, 0.0, -0.4], rtol=1e-5)
    gradient = jax.grad(lambda x: dppo_loss(x, old, advantages, tv_max=0.15).loss.sum())(new)
    np.testing.assert_allclose(gradient, result.loss, rtol=1e-5)
    assert np.flatnonzero(result.clipped_high).tolist() == [1]
    assert np.flatnonzero(result.clipped_low).tolist() == [3]


def test_one_wild_token_moves_a_geometric_mean_no_further_than_its_bound():
    logprobs = jnp.array([[5.0, 0.0, 0.1]])
    everything = jnp.ones((1, 3), bool), jnp.ones((1, 3), jnp.int32)

    def loss(logprobs):
        old = jnp.zeros((1, 3))
        return gmpo_loss(logprobs, old, jnp.ones((1, 3)), *everything, clip_low=0.3, clip_high=0.5).loss

    np.testing.assert_allclose(loss(logprobs), -((1.5 * 1.0 * np.exp(0.1)) ** (1 / 3)), rtol=1e-6)
    gradient = jax.grad(lambda x: loss(x).mean())(logprobs)[0]
    assert gradient[0] == 0
    np.testing.assert_allclose(gradient[1:], loss(logprobs)[0, 1:] / 3, rtol=1e-5)


def test_clip_counts_by_side():
    result = clip_loss(jnp.log(RATIOS), jnp.zeros(8), ADVANTAGES, clip_low=0.2, clip_high=0.5, dual_clip=3.0)
    assert np.flatnonzero(result.clipped_high).tolist() == [2]
    assert np.flatnonzero(result.clipped_low).tolist() == [3]
    assert np.flatnonzero(result.dual_clipped).tolist() == [6]


def test_a_ratio_on_the_edge_keeps_its_gradient():
    gradient, _ = jax.grad(clip_sum, has_aux=True)(jnp.zeros(8), clip_low=0.0, clip_high=0.0)
    np.testing.assert_array_equal(gradient, -ADVANTAGES)


def test_no_bound_on_a_side():
    gradient, _ = jax.grad(clip_sum, has_aux=True)(jnp.log(RATIOS), clip_low=None, clip_high=None, dual_clip=None)
    np.testing.assert_allclose(gradient, -ADVANTAGES * RATIOS, rtol=1e-6)


@pytest.mark.parametrize("loss", [clip_loss, sapo_loss])
@pytest.mark.parametrize("log_ratio", [-1000.0, -21.0, 21.0, 1000.0])
def test_the_guard_ends_the_gradient(loss, log_ratio):
    options = {"clip_low": 0.2, "clip_high": 0.2} if loss is clip_loss else {}

    def total(logprobs):
        return loss(logprobs, jnp.zeros(2), jnp.array([1.0, -1.0]), log_ratio_clamp=20.0, **options).loss.sum()

    value, gradient = jax.value_and_grad(total)(jnp.full(2, log_ratio))
    assert np.isfinite(value)
    np.testing.assert_array_equal(gradient, 0)


def test_the_guard_hides_no_nan():
    assert np.isnan(guard(jnp.array(jnp.nan), 20.0))


def test_gspo_sends_its_gradient_to_every_token_and_gspo_token_to_its_own():
    mask, segments = jnp.array([[True, True, False, True]]), jnp.array([[1, 1, 1, 2]])
    advantages = jnp.array([[1.0, 0.0, 0.0, 0.0]])

    def gradient(loss):
        def total(logprobs):
            result = loss(logprobs, jnp.zeros((1, 4)), advantages, mask, segments, clip_low=0.5, clip_high=0.5)
            return jnp.sum(result.loss)

        return jax.grad(total)(jnp.zeros((1, 4)))

    np.testing.assert_allclose(gradient(gspo_loss), [[-0.5, -0.5, 0.0, 0.0]])
    np.testing.assert_allclose(gradient(gspo_token_loss), [[-1.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize("kind", ["k2", "k3", "abs"])
def test_kl_has_no_slope_at_the_reference(kind):
    value, slope = jax.value_and_grad(lambda d: kl_estimate(d, kind=kind))(0.0)
    assert (value, slope) == (0.0, 0.0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("log_ratio", [-200.0, 200.0])
def test_a_clamped_kl_has_no_slope_even_where_its_exponential_overflows(kind, log_ratio):
    value, slope = jax.value_and_grad(lambda d: kl_estimate(d, kind=kind, clamp=10.0))(log_ratio)
    assert (abs(value), slope) == (10.0, 0.0)


REF = jax.nn.log_softmax(jnp.array([0.3, -1.0, 0.8]))
LOGITS = jnp.array([1.0, 0.5, -0.7])
"""A policy over three tokens, and its reference."""


def kl(a, b):
    return jnp.sum(jnp.exp(a) * (a - b))


def gradient_of(distance):
    return jax.grad(lambda x: distance(jax.nn.log_softmax(x)))(LOGITS)


REVERSE = gradient_of(lambda p: kl(p, REF))
FORWARD = gradient_of(lambda p: kl(REF, p))
VARIATION = gradient_of(lambda p: jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(REF))))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_gradients_of_the_kl_in_the_loss(kind):
    """Exact sums over a small vocabulary: k1 and k3 estimate KL; the gradients are those that the module promises."""
    policy = jax.nn.log_softmax(LOGITS)

    def expected(logits):
        estimate = kl_estimate(jax.nn.log_softmax(logits) - REF, kind=kind)
        return jnp.sum(jnp.exp(policy) * estimate)

    want = {"k1": jnp.zeros(3), "k2": REVERSE, "k3": FORWARD, "abs": VARIATION}
    np.testing.assert_allclose(jax.grad(expected)(LOGITS), want[kind], atol=1e-6)
    if kind in ("k1", "k3"):
        np.testing.assert_allclose(expected(LOGITS), kl(policy, REF), rtol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_gradients_of_the_kl_in_the_reward(kind):
    """A policy gradient whose advantage is minus the estimate, as a number: what descends on it is `want`."""
    policy = jax.nn.log_softmax(LOGITS)
    rewards = -kl_on_host(np.asarray(policy - REF), kind=kind)

    def expected(logits):
        return jnp.sum(jnp.exp(policy) * reinforce_loss(jax.nn.log_softmax(logits), jnp.asarray(rewards)).loss)

    found = jax.grad(expected)(LOGITS)
    if kind in ("k1", "k3"):
        np.testing.assert_allclose(found, {"k1": REVERSE, "k3": REVERSE - FORWARD}[kind], atol=1e-6)
    else:
        distance = min(np.abs(found - other).max() for other in (REVERSE, FORWARD, VARIATION))
        assert distance > 0.05, "it is the gradient of none of these"


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_the_estimators_on_the_host_are_the_same(kind):
    d = np.linspace(-3, 3, 13)
    want = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "abs": np.abs(d)}[kind]
    np.testing.assert_allclose(kl_on_host(d, kind=kind), want, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(kl_estimate(jnp.asarray(d), kind=kind), want, rtol=1e-5, atol=1e-6)


def test_unknown_kl_kind():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; choose one of k1, k2, k3, abs"):
        kl_estimate(jnp.zeros(1), kind="k4")
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; choose one of k1, k2, k3, abs"):
        kl_on_host(np.zeros(1), kind="k4")
