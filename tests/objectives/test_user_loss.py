"""What a policy loss may ask for and return; every message shows the offending value and the expected signature."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.objectives import LossError, ObjectiveSpec, finish_metrics, policy_objective, try_loss
from hermes_jax.objectives.sample_batch import ONE_PER_ROW, lay_out, made_up_sequences
from hermes_jax.objectives.user_loss import ARRAYS
from tests.objectives.test_objective import TWO, small_batch

SIGNATURE = "expected: def "


def good(logprobs, advantages):
    return -advantages * logprobs


def refused(loss, **options) -> str:
    with pytest.raises(LossError) as caught:
        try_loss(ObjectiveSpec(loss, **options))
    message = str(caught.value)
    assert SIGNATURE in message, message
    assert f"arrays by name, each [rows, width]: {', '.join(ARRAYS)}" in message
    return message


def test_a_loss_per_token_is_aggregated_by_the_library() -> None:
    loss, metrics = policy_objective(small_batch(), ObjectiveSpec(good), TWO)
    want, _ = policy_objective(small_batch(), ObjectiveSpec("reinforce"), TWO)
    assert loss == want
    assert not [name for name in finish_metrics(metrics) if name.startswith("policy_loss/")]


def test_metrics_of_its_own_are_means_over_trained_tokens() -> None:
    def loss(logprobs, advantages):
        return -advantages * logprobs, {"far": logprobs < -2.5, "two": 2.0}

    _, metrics = policy_objective(small_batch(), ObjectiveSpec(loss), TWO)
    found = finish_metrics(metrics)
    assert (found["policy_loss/far"], found["policy_loss/two"]) == (0.5, 2.0)


def test_metrics_carry_no_gradient_and_add_up_over_micro_batches() -> None:
    def loss(logprobs, advantages):
        return -advantages * logprobs, {"level": logprobs}

    batch = lay_out(made_up_sequences(), ONE_PER_ROW)
    spec = ObjectiveSpec(loss)
    whole = finish_metrics(policy_objective(batch, spec, TWO)[1])["policy_loss/level"]
    parts = [jax.tree.map(lambda x, cut=cut: x[cut], batch) for cut in (slice(0, 2), slice(2, None))]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(policy_objective(part, spec, TWO)[1] for part in parts))
    np.testing.assert_allclose(finish_metrics(stacked)["policy_loss/level"], whole, rtol=1e-6)


def test_arrays_come_by_name_and_are_0_outside_the_mask() -> None:
    seen = {}

    def loss(**arrays):
        raise AssertionError("unreachable")

    with pytest.raises(LossError, match=r"takes \*\*arrays: each argument needs a name of its own"):
        ObjectiveSpec(loss)

    def spy(turn, policy_version, positions, temperature, rollout_logprobs, ref_logprobs, entropy, logprobs):
        seen.update(locals())
        return logprobs

    batch = lay_out(made_up_sequences(), ONE_PER_ROW)
    batch = batch._replace(rollout_logprobs=jnp.full_like(batch.logprobs, jnp.nan))
    policy_objective(batch, ObjectiveSpec(spy), TWO)
    outside = ~np.asarray(batch.loss_mask)
    for name in ("temperature", "rollout_logprobs", "ref_logprobs", "entropy", "logprobs"):
        assert not np.asarray(seen[name])[outside].any(), name
    np.testing.assert_array_equal(seen["turn"], batch.turn)
    np.testing.assert_array_equal(seen["policy_version"], batch.policy_version)
    np.testing.assert_array_equal(seen["positions"], batch.positions)
    kept = np.asarray(batch.loss_mask)
    np.testing.assert_array_equal(np.asarray(seen["rollout_logprobs"])[kept], np.asarray(batch.old_logprobs)[kept])


def test_options_come_by_name_and_others_keep_their_defaults() -> None:
    def loss(logprobs, *, clip_low, strength=2.0):
        return logprobs * clip_low * strength

    spec = ObjectiveSpec(loss, clip_low=0.5)
    assert policy_objective(small_batch(), spec, TWO)[0] == -2.5
    stronger = ObjectiveSpec(functools.partial(loss, strength=4.0), clip_low=0.5)
    assert policy_objective(small_batch(), stronger, TWO)[0] == -5.0
    assert "token_mean[loss(clip_low=0.5)]; loss = tests.objectives.test_user_loss:" in stronger.formula()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda logprob: logprob, "asks for logprob, which there is not (did you mean logprobs?)"),
        (lambda logprobs, /: logprobs, "takes logprobs: each argument needs a name of its own"),
        (lambda logprobs: logprobs.sum(axis=1), "returns a loss of shape (4,), not (4, 17) as its arrays have"),
        (lambda logprobs: logprobs > 0, "returns a loss of dtype bool, which is not floating point"),
        (lambda logprobs: (logprobs * 1).astype(int), "returns a loss of dtype int32, which is not floating point"),
        (lambda logprobs: 3.0, "returns 3.0 (float), which is no array"),
        (lambda logprobs: None, "returns None (NoneType), which is no array"),
        (lambda logprobs: (logprobs.sum(), 4.0), "returns (an array of shape (), 4.0 (float)): a pair is"),
        (lambda logprobs: (logprobs, {"a b": 1.0}), "has a metric named 'a b'"),
        (lambda logprobs: (logprobs, {"n": logprobs[0]}), "has a metric 'n' of shape (17,), not (4, 17) or ()"),
        (lambda logprobs: logprobs * jnp.nan, "gives a loss of nan on an ordinary batch, at (0, 1)"),
        (lambda logprobs: logprobs + jnp.sqrt(logprobs * 0), "d loss / d logprobs[0, 1] is nan"),
        (lambda logprobs: logprobs if logprobs[0, 0] < 0 else -logprobs, "it uses the value of an array in Python"),
        (lambda logprobs: logprobs * np.asarray(logprobs), "it uses the value of an array in Python"),
        (lambda logprobs: logprobs * np.random.default_rng().normal(), "gives other values when called twice"),
        (lambda logprobs: logprobs @ logprobs, "fails"),
    ],
)
def test_what_is_wrong_is_said(loss, words: str) -> None:
    assert words in refused(loss)


def test_a_failure_names_the_line() -> None:
    def divides(logprobs):
        nothing = {}
        return logprobs / nothing["here"]

    message = refused(divides)
    assert "fails in line " in message
    assert "(return logprobs / nothing[\"here\"]): KeyError: 'here'" in message


def test_what_is_no_function() -> None:
    with pytest.raises(LossError, match=r"a policy loss is a function, got 3 \(int\)"):
        ObjectiveSpec(3)


def test_an_array_that_the_batch_does_not_have_is_named() -> None:
    with pytest.raises(LossError, match="asks for entropy, turn, which this batch does not have"):
        policy_objective(small_batch(), ObjectiveSpec(lambda logprobs, entropy, turn: logprobs), TWO)


def test_a_good_loss_may_begin() -> None:
    try_loss(ObjectiveSpec(good))
