"""The composed objective: what it needs, what it refuses, how it prints, and that it runs inside an update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hermes_jax.objectives import (
    Correction,
    Denominators,
    ObjectiveSpec,
    PolicyBatch,
    Surrogate,
    aggregate,
    count_denominators,
    effective_sample_size,
    finish_metrics,
    merge_metrics,
    policy_objective,
    rollout_weights,
    weight_metrics,
)

TWO = Denominators(jnp.float32(2), jnp.float32(1))


def small_batch(**changes) -> PolicyBatch:
    arrays = {
        "logprobs": jnp.array([[-1.0, -2.0, -3.0]]),
        "loss_mask": jnp.array([[False, True, True]]),
        "segment_ids": jnp.array([[1, 1, 1]]),
        "advantages": jnp.array([[1.0, 1.0, -1.0]]),
        "old_logprobs": jnp.array([[-1.0, -2.5, -2.5]]),
    }
    return PolicyBatch(**(arrays | changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "ppo"}, "unknown objective 'ppo'; choose one of clip, gspo"),
        ({"aggregation": "mean"}, "unknown aggregation 'mean'; choose one of token_mean"),
        ({"aggregation": "constant"}, "needs max_tokens >= 1, got None"),
        ({"kl": "k4"}, "unknown KL estimator 'k4'"),
        ({"beta": 0.1}, "beta=0.1 has no KL term to weigh; set kl"),
        ({"kl": "k3", "beta": -0.1}, "beta must be >= 0"),
        ({"clip_low": -0.2}, "clip_low must be >= 0, got -0.2"),
        ({"log_ratio_clamp": 0.0}, "log_ratio_clamp must be > 0"),
        ({"dual_clip": 1.0}, "dual_clip .* must be > 1"),
        ({"objective": lambda logprobs, epsilon: Surrogate(logprobs)}, "asks for epsilon"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveSpec(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "tis"}, "unknown correction mode 'tis'; choose one of token_truncate"),
        ({"mode": "token_truncate", "low": 0.5}, "'token_truncate' does not use low; remove it"),
        ({"mode": "token_mask", "max": 2.0}, "'token_mask' does not use max; remove it"),
        ({"mode": "token_mask", "low": 2.0, "high": 1.0}, "lies above high"),
        ({"mode": "token_mask", "keep_weight": "two"}, "keep_weight must be one of ratio, one"),
    ],
)
def test_a_wrong_correction_is_refused_with_the_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        Correction(**options)


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        (ObjectiveSpec(kl="k3"), "KL term but the batch has no ref_logprobs"),
        (ObjectiveSpec(correction=Correction("token_truncate", max=2.0)), "correction but the batch has no rollout"),
        (ObjectiveSpec(entropy_coef=0.1), "entropy bonus but the batch has no entropy"),
    ],
)
def test_a_missing_array_is_named(spec, missing):
    with pytest.raises(ValueError, match=missing):
        policy_objective(small_batch(), spec, TWO)


def test_shapes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"advantages has shape \(1,\), loss_mask \(1, 3\)"):
        policy_objective(small_batch(advantages=jnp.ones(1)), ObjectiveSpec(), TWO)


def test_formula_is_one_line_with_the_numbers_in_force():
    spec = ObjectiveSpec(
        dual_clip=3.0,
        aggregation="constant",
        max_tokens=20,
        kl="k3",
        beta=0.05,
        kl_clamp=10.0,
        entropy_coef=0.01,
        correction=Correction("token_truncate", max=2.0),
    )
    assert spec.formula() == (
        "loss = constant[w * min(-min(r A, clip(r, 0.8, 1.28) A), -3 A if A < 0)] (max_tokens=20) "
        "+ 0.05 * constant[k3(lp - ref, clamped at 10)] (max_tokens=20) - 0.01 * constant[entropy] (max_tokens=20); "
        "r = exp(clip(lp - old, +-20)); w = min(exp(old - rollout), 2)"
    )
    assert ObjectiveSpec("reinforce").formula() == "loss = token_mean[-A lp]"
    gspo = ObjectiveSpec("gspo", clip_low=3e-4, clip_high=4e-4, log_ratio_clamp=None).formula()
    assert gspo == "loss = token_mean[-min(r A, clip(r, 0.9997, 1.0004) A)]; r = exp(mean(lp - old))"


def test_settings_that_are_hardly_meant_are_pointed_out():
    assert "k1 in the loss" in ObjectiveSpec(kl="k1", beta=0.04).warnings()[0]
    assert "3e-4/4e-4 is usual" in ObjectiveSpec("gspo").warnings()[0]
    assert ObjectiveSpec(kl="k3", beta=0.04).warnings() == ()


def test_a_function_of_ones_own_is_an_objective():
    def squared(logprobs, advantages, *, beta):
        return Surrogate(-advantages * logprobs**2 * (1 + beta))

    spec = ObjectiveSpec(squared)
    loss, metrics = policy_objective(small_batch(), spec, TWO)
    np.testing.assert_allclose(loss, (-4.0 + 9.0) / 2)
    assert "ratio_mean" not in finish_metrics(metrics)
    line = spec.formula()
    assert line.startswith("loss = token_mean[squared(beta=0.0)]; squared = tests.objectives.test_objective:test_a_")
    assert line.endswith("squared, in place of a named objective")


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_that_of_reinforce():
    def gradient(spec, batch):
        return jax.grad(lambda x: policy_objective(batch._replace(logprobs=x), spec, TWO)[0])(batch.logprobs)

    batch = small_batch(old_logprobs=None)
    np.testing.assert_array_equal(gradient(ObjectiveSpec(), batch), gradient(ObjectiveSpec("reinforce"), batch))
    metrics = finish_metrics(policy_objective(batch, ObjectiveSpec(), TWO)[1])
    assert (metrics["ratio_deviation_max"], metrics["approx_kl_k1"]) == (0.0, 0.0)


def test_metrics_of_a_hand_worked_batch():
    batch = small_batch(rollout_logprobs=jnp.array([[0.0, -2.5, jnp.nan]]), entropy=jnp.array([[9.0, 1.0, 2.0]]))
    metrics = {k: float(v) for k, v in finish_metrics(policy_objective(batch, ObjectiveSpec(), TWO)[1]).items()}
    up, down = np.exp(0.5), np.exp(-0.5)
    want = {
        "clip_frac": 1.0,
        "clip_frac_high": 0.5,
        "clip_frac_low": 0.5,
        "approx_kl_k1": 0.0,
        "ratio_mean": (up + down) / 2,
        "ratio_min": down,
        "ratio_max": up,
        "ratio_deviation_max": up - 1,
        "entropy_mean": 1.5,
        "policy_loss": (-1.28 + 0.8) / 2,
        "correction/logprob_diff_abs_max": 0.0,
    }
    assert {name: metrics[name] for name in want} == pytest.approx(want, abs=1e-6)


def test_kl_with_beta_zero_is_measured_only():
    batch = small_batch(ref_logprobs=jnp.array([[0.0, -2.5, -200.0]]))
    with_kl, metrics = policy_objective(batch, ObjectiveSpec(kl="k1"), TWO)
    assert with_kl == policy_objective(batch, ObjectiveSpec(), TWO)[0]
    np.testing.assert_allclose(finish_metrics(metrics)["kl_mean"], (0.5 + 197.0) / 2)


def test_half_precision_inputs_are_summed_in_float32():
    batch = small_batch()
    half = batch._replace(
        logprobs=batch.logprobs.astype(jnp.bfloat16), advantages=batch.advantages.astype(jnp.bfloat16)
    )
    loss, metrics = policy_objective(half, ObjectiveSpec(), TWO)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(metrics)} == {jnp.dtype(jnp.float32)}


def test_micro_batches_in_a_scan():
    """As an update uses it: static spec, denominators of the whole, metrics stacked by the scan."""
    rng = np.random.default_rng(0)
    logprobs, old, advantages = (jnp.asarray(rng.normal(size=(3, 2, 5)), jnp.float32) for _ in range(3))
    mask, segments = jnp.asarray(rng.random((3, 2, 5)) < 0.6), jnp.ones((3, 2, 5), jnp.int32)
    spec = ObjectiveSpec(aggregation="sequence_mean")

    @jax.jit
    def update(logprobs):
        whole = count_denominators(mask, segments, spec.aggregation)

        def micro(total, part):
            loss, metrics = policy_objective(PolicyBatch(*part), spec, whole)
            return total + loss, metrics

        total, stacked = lax.scan(micro, jnp.float32(0), (logprobs, mask, segments, advantages, old))
        return total, finish_metrics(stacked)

    (loss, metrics), gradient = jax.value_and_grad(update, has_aux=True)(logprobs)
    flat = PolicyBatch(*(x.reshape(6, 5) for x in (logprobs, mask, segments, advantages, old)))
    want, _ = policy_objective(flat, spec, count_denominators(flat.loss_mask, flat.segment_ids, spec.aggregation))
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(metrics["policy_loss"], want, rtol=1e-6)
    assert (np.asarray(gradient)[~np.asarray(mask)] == 0).all()


def test_aggregation_gives_the_sum_and_the_denominator_of_the_whole_update():
    loss, mask, segments = jnp.array([[1.0, 2.0, 4.0]]), jnp.ones((1, 3), bool), jnp.array([[1, 1, 2]])
    results = {
        mode: aggregate(loss, mask, segments, mode=mode, max_tokens=10, denominators=Denominators(8.0, 5.0))
        for mode in ("token_mean", "sequence_mean", "sequence_sum", "constant")
    }
    assert results == {
        "token_mean": (7.0, 8.0),
        "sequence_mean": (5.5, 5.0),
        "sequence_sum": (7.0, 5.0),
        "constant": (7.0, 50.0),
    }


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask_product", "token_truncate"])
def test_an_unbounded_correction_stays_finite(mode):
    old, rollout = jnp.zeros((1, 3)), jnp.array([[-200.0, 200.0, -jnp.inf]])
    result = rollout_weights(old, rollout, jnp.ones((1, 3), bool), jnp.ones((1, 3), jnp.int32), Correction(mode))
    assert np.isfinite(result.weights).all()
    assert result.weights[0, 2] == (1.0 if mode.startswith("token") else result.weights[0, 0])
    assert not result.affected.any()


def test_the_effective_sample_size_is_that_of_all_micro_batches_together():
    rng = np.random.default_rng(0)
    old, rollout = rng.normal(-2, 0.5, (2, 3, 7)), rng.normal(-2, 0.5, (2, 3, 7))
    mask = rng.random((2, 3, 7)) < 0.7
    correction = Correction("token_mask", low=0.5, high=2.0)
    parts = [
        weight_metrics(rollout_weights(*(jnp.asarray(x) for x in (o, r, m, np.ones_like(m, int))), correction), m)
        for o, r, m in zip(old, rollout, mask, strict=True)
    ]
    ratio = np.exp(old - rollout)[mask]
    weights = np.where((ratio >= 0.5) & (ratio <= 2.0), ratio, 0.0)
    want = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    got = effective_sample_size(finish_metrics(merge_metrics(*parts)))["correction/effective_sample_size"]
    assert 0.3 < want < 0.95, "the case is no trivial one"
    np.testing.assert_allclose(got, want, rtol=1e-5)
    nothing = {"correction/weight_mean": jnp.zeros(()), "correction/weight_square_mean": jnp.zeros(())}
    assert effective_sample_size(nothing) == {"correction/effective_sample_size": 0.0}
    assert effective_sample_size({}) == {}


def test_weights_carry_no_gradient():
    spec = ObjectiveSpec("reinforce", correction=Correction("token_truncate"))
    batch = small_batch(old_logprobs=None, rollout_logprobs=jnp.full((1, 3), -4.0))
    gradient = jax.grad(lambda x: policy_objective(batch._replace(logprobs=x), spec, TWO)[0])(batch.logprobs)
    np.testing.assert_allclose(gradient, [[0.0, -np.exp(2.0) / 2, np.exp(1.0) / 2]], rtol=1e-6)
