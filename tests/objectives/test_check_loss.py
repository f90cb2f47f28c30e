"""The self-test of losses: our own pass, and every planted fault fails the check that is meant for it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.objectives import OBJECTIVES, ObjectiveSpec, Surrogate, check_loss, segment_means
from hermes_jax.objectives.check import CHECKS
from hermes_jax.objectives.numeric_gradient import differences, held_fixed
from hermes_jax.objectives.segments import segment_totals


@pytest.mark.parametrize("name", OBJECTIVES)
def test_our_own_losses_pass(name: str) -> None:
    report = check_loss(name)
    assert report.ok, report
    assert [check.name for check in report.checks] == list(CHECKS)


def ratio(logprobs, old_logprobs):
    return jnp.exp(jnp.clip(logprobs - old_logprobs, -20, 20))


def leaks_the_mask(logprobs, old_logprobs, advantages, segment_ids):
    whole = jnp.clip(segment_totals(logprobs - old_logprobs, segment_ids), -20, 20)
    return -jnp.exp(whole) * advantages


def divides_by_the_width(logprobs, old_logprobs, advantages):
    return -ratio(logprobs, old_logprobs) * advantages / logprobs.shape[-1]


def sums_over_the_row(logprobs, old_logprobs, advantages, loss_mask):
    mean = jnp.sum(jnp.where(loss_mask, logprobs - old_logprobs, 0), -1, keepdims=True)
    return -jnp.exp(jnp.clip(mean, -2, 2)) * advantages


def divides_by_local_counts(logprobs, old_logprobs, advantages, loss_mask):
    return -ratio(logprobs, old_logprobs) * advantages / jnp.maximum(loss_mask.sum(), 1)


def weighs_by_the_place(logprobs, old_logprobs, advantages):
    rows = jnp.arange(logprobs.shape[0])[:, None] % 7
    return -ratio(logprobs, old_logprobs) * advantages * (1 + rows)


def explodes(logprobs, old_logprobs, advantages):
    return -jnp.exp(logprobs - old_logprobs) * advantages


def weighs_by_masked_tokens(logprobs, old_logprobs, advantages, segment_ids):
    whole = jax.lax.stop_gradient(segment_totals(logprobs - old_logprobs, segment_ids))
    return -jnp.exp(jnp.clip(whole, -2, 2)) * advantages * logprobs


def pulls_without_advantage(logprobs, ref_logprobs, advantages):
    return -advantages * logprobs + 0.1 * (logprobs - ref_logprobs) ** 2


@jax.custom_jvp
def doubled(x):
    return x


doubled.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))


def wrong_derivative(logprobs, advantages):
    return -advantages * doubled(logprobs)


calls = itertools.count()
kept: list = []


def counts_its_calls(logprobs, advantages):
    return -advantages * logprobs * next(calls)


def keeps_what_it_sees(logprobs, advantages):
    kept.append(logprobs * 2)
    return -advantages * logprobs


def needs_values(logprobs, advantages):
    return -advantages * logprobs if logprobs.sum() < 0 else advantages * logprobs


def is_nan(logprobs, advantages):
    return -advantages * jnp.log(logprobs)


FAULTS = {
    leaks_the_mask: ("mask", "of tokens that are not: d loss / d logprobs"),
    divides_by_the_width: ("padding", "with three more columns and rows of padding the loss is"),
    sums_over_the_row: ("packing", "sum by segment_ids, not over a row"),
    divides_by_local_counts: ("micro-batches", "don't divide by counts or means of the batch"),
    weighs_by_the_place: ("permutation", "with the sequences in another order"),
    explodes: ("extreme ratios", "bound exponents before exp (objectives.guard)"),
    weighs_by_masked_tokens: ("masked NaN", "in masked places the loss of the trained token [0, 1] is nan"),
    pulls_without_advantage: ("zero advantage", "options of its own (beta, entropy_coef)"),
    wrong_derivative: ("numeric gradient", "a custom derivative is wrong?"),
    counts_its_calls: ("pure", "gives other values when called twice"),
    keeps_what_it_sees: ("pure", "has a side effect under jit: it keeps an array of a trace"),
    needs_values: ("signature", "can't be compiled in line"),
    is_nan: ("finite", "gives a loss of nan on an ordinary batch, at (0, 1)"),
}
TOGETHER = {
    leaks_the_mask: {"mask", "masked NaN"},
    divides_by_the_width: {"padding", "packing", "micro-batches"},
    weighs_by_the_place: {"permutation", "packing", "micro-batches"},
}
"""Faults that more than one check finds, and which."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_fails_the_right_check(fault) -> None:
    check, words = FAULTS[fault]
    report = check_loss(fault)
    assert not report.ok
    assert check in report.failed, report
    assert set(report.failed) == TOGETHER.get(fault, {check}), report
    detail = next(c.detail for c in report.checks if c.name == check)
    assert words in detail
    assert f"FAILED: {', '.join(report.failed)}" in str(report).splitlines()[0]
    assert f"FAIL {check}" in str(report)


def test_nothing_is_tried_with_a_wrong_signature() -> None:
    report = check_loss(lambda logprobs, advantage: logprobs)
    assert report.failed == ("signature",)
    assert "asks for advantage, which there is not (did you mean advantages?)" in str(report)
    assert {c.passed for c in report.checks[1:]} == {None}


def test_options_and_whole_objectives() -> None:
    report = check_loss("gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean")
    assert report.ok, report
    spec = ObjectiveSpec("cispo", kl="k2", beta=0.1)
    report = check_loss(spec)
    assert report.failed == ("zero advantage",), report
    assert report.loss == spec.formula()


def test_a_good_loss_with_stop_gradients_and_all_arrays_passes() -> None:
    def everything(
        logprobs,
        old_logprobs,
        ref_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        entropy,
        segment_ids,
        positions,
        turn,
        policy_version,
        temperature,
        *,
        strength=0.5,
    ):
        w = jax.lax.stop_gradient(jnp.exp(jnp.clip(logprobs - rollout_logprobs, -1, 1)))
        far = jnp.abs(segment_means(logprobs - ref_logprobs, loss_mask, segment_ids)) > 0.5
        late = (turn > 0) & (positions > 2) & (policy_version >= 3)
        scale = jnp.where(late & ~far, strength, 1.0) / temperature * (1 + 0 * old_logprobs)
        loss = -w * advantages * logprobs * scale - advantages**2 * entropy * 0.01
        return Surrogate(jnp.where(loss_mask, loss, 0.0))

    report = check_loss(everything)
    assert report.ok, report


def test_finite_differences_hold_what_is_under_stop_gradient() -> None:
    x = np.array([0.5, -1.5])

    def f(x):
        return jnp.sum(jax.lax.stop_gradient(x) ** 2 * x) + jax.jit(lambda y: jnp.sum(jax.lax.stop_gradient(y) * y))(x)

    with jax.enable_x64(True):
        ahead, behind = differences(held_fixed(f, jnp.asarray(x)), jnp.asarray(x), 1e-4)
        np.testing.assert_allclose((ahead + behind) / 2, x**2 + x, rtol=1e-6)
        free, _ = differences(f, jnp.asarray(x), 1e-5)
        np.testing.assert_allclose(free, 3 * x**2 + 2 * x, rtol=1e-3)
