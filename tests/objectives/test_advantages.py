"""Group advantages: against the loop, and the exact rules."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hermes_jax.objectives import ADVANTAGE_METHODS, gdpo_advantages, group_advantages, pass_at_k_advantages
from tests.objectives import oracle

GROUP_METHODS = ADVANTAGE_METHODS[:4]
each_method = pytest.mark.parametrize("method", ADVANTAGE_METHODS)


def random_batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interleaved groups of unequal size: graded, binary and constant rewards, some missing."""
    size = int(rng.integers(1, 40))
    ids = rng.integers(0, rng.integers(1, 9), size) * 7 - 3
    kind = rng.integers(0, 3)
    rewards = [rng.normal(size=size), rng.integers(0, 2, size).astype(float), np.full(size, 0.1)][kind]
    rewards[rng.random(size) < 0.15] = np.nan
    return rewards, ids, rng.integers(1, 30, size)


@each_method
@pytest.mark.parametrize("ddof", [0, 1])
def test_equals_the_loop_over_groups_for_200_batches(method, ddof):
    rng = np.random.default_rng(3)
    for _ in range(200):
        rewards, ids, counts = random_batch(rng)
        weighting = "token" if method in ("batch_norm", "group_mean_batch_norm") and rng.random() < 0.5 else "sequence"
        got = group_advantages(rewards, ids, method=method, ddof=ddof, weighting=weighting, token_counts=counts)
        want = oracle.group_advantages(
            rewards, ids, method, ddof=ddof, token_counts=counts if weighting == "token" else None
        )
        valid = rewards[np.isfinite(rewards)]
        if valid.size == 0 or (method.endswith("norm") and np.ptp(valid) < 1e-9):
            want = np.zeros_like(rewards)
        np.testing.assert_allclose(got.advantages, want, rtol=1e-8, atol=1e-8 if method.endswith("norm") else 1e-10)


@each_method
def test_shift_of_all_rewards_changes_nothing(method):
    rng = np.random.default_rng(5)
    for _ in range(50):
        rewards, ids, _ = random_batch(rng)
        base = group_advantages(rewards, ids, method=method).advantages
        for shift in (1.0, -300.5):
            moved = group_advantages(rewards + shift, ids, method=method).advantages
            np.testing.assert_allclose(moved, base, atol=1e-9, rtol=1e-9)


@each_method
def test_order_changes_nothing(method):
    rng = np.random.default_rng(6)
    for _ in range(50):
        rewards, ids, _ = random_batch(rng)
        order = rng.permutation(len(rewards))
        base = group_advantages(rewards, ids, method=method).advantages
        np.testing.assert_allclose(
            group_advantages(rewards[order], ids[order], method=method).advantages, base[order], rtol=1e-9, atol=1e-9
        )


@each_method
@pytest.mark.filterwarnings("error")
def test_huge_rewards_stay_finite(method):
    for rewards in ([1e30, -1e30, 0.0, 1.0], [1e200, 1.0, 0.0, 0.5], [1e-200, 0.0, 1.0, 2.0]):
        result = group_advantages(rewards, [0, 0, 1, 1], method=method)
        assert np.isfinite(result.advantages).all()


@pytest.mark.parametrize("method", GROUP_METHODS)
@pytest.mark.parametrize("value", [0.1, 0.7, -2.5, 1e9, 1 / 3])
def test_equal_rewards_give_exactly_zero(method, value):
    for size in range(2, 41):
        result = group_advantages(np.full(size, value, np.float32), ["g"] * size, method=method)
        assert (result.advantages == 0).all()
        assert result.constant.tolist() == [True]
        assert result.too_few.tolist() == [False]


@pytest.mark.parametrize("method", GROUP_METHODS)
def test_rounding_noise_is_no_signal_but_a_small_difference_is(method):
    assert (group_advantages([0.3, 0.1 + 0.2, 0.3], [0] * 3, method=method).advantages == 0).all()
    assert (group_advantages([0.3, 0.3001, 0.3], [0] * 3, method=method).advantages != 0).all()


@each_method
@pytest.mark.filterwarnings("error")
def test_missing_rewards_and_small_groups(method):
    result = group_advantages([1, None, 0, None, 3.0, np.inf], ["a", "a", "a", "b", "c", "c"], method=method)
    assert result.valid.tolist() == [True, False, True, False, True, False]
    assert result.too_few.tolist() == [False, True, True]
    assert result.degenerate.tolist() == [False, True, True]
    assert result.group_ids.tolist() == ["a", "b", "c"]
    assert (result.advantages[[1, 3, 5]] == 0).all()
    if method in GROUP_METHODS:
        assert result.advantages[4] == 0


@each_method
@pytest.mark.filterwarnings("error")
def test_nothing_at_all(method):
    assert group_advantages([], [], method=method).advantages.shape == (0,)
    assert group_advantages([None, None], [0, 1], method=method).advantages.tolist() == [0, 0]
    assert group_advantages([2.0], [0], method=method).advantages.tolist() == [0]


def test_means_of_groups_are_zero_and_std_one():
    rng = np.random.default_rng(8)
    rewards, ids = rng.normal(size=32), np.repeat(np.arange(4), 8)
    advantages = group_advantages(rewards, ids, eps=0.0).advantages.reshape(4, 8)
    np.testing.assert_allclose(advantages.mean(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(advantages.std(axis=1, ddof=1), 1, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "grpo"}, "unknown advantage method 'grpo'; choose one of group_mean_std"),
        ({"weighting": "row"}, "unknown weighting 'row'; choose one of sequence, token"),
        ({"weighting": "token"}, "needs the token count of each of the 2 episodes, got none"),
        ({"weighting": "token", "token_counts": [1]}, "got 1"),
        ({"ddof": 2}, "ddof must be 0 or 1, got 2"),
        ({"group_ids": [0]}, "one reward and one group id per episode"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(**{"rewards": [1.0, 0.0], "group_ids": [0, 0], **options})


@pytest.mark.parametrize("scale", [1e30, 1e154, 1e200, 1e308])
def test_the_largest_rewards_stay_finite(scale):
    """Their squares overflow, and of the largest even their difference does."""
    got = {m: group_advantages([scale, -scale, 0.0], [0] * 3, method=m) for m in ("group_mean", "group_mean_std")}
    np.testing.assert_allclose(got["group_mean"].advantages, [scale, -scale, 0.0], rtol=1e-12)
    np.testing.assert_allclose(got["group_mean_std"].advantages, [1.0, -1.0, 0.0], rtol=1e-9)


def test_gdpo_equals_the_loop_for_200_batches():
    rng = np.random.default_rng(4)
    for _ in range(200):
        rewards, ids, _ = random_batch(rng)
        other = np.where(rng.random(len(ids)) < 0.1, np.nan, rng.integers(0, 3, len(ids)))
        got = gdpo_advantages({"a": rewards, "b": other}, ids)
        want = oracle.gdpo_advantages({"a": rewards, "b": other}, ids)
        np.testing.assert_allclose(got.advantages, want, rtol=1e-8, atol=1e-8)
        assert got.valid.tolist() == (np.isfinite(rewards) | np.isfinite(other)).tolist()


def test_gdpo_tells_apart_what_adds_up_to_the_same():
    parts = {"right": [1.0, 0.0, 1.0, 1.0], "brief": [0.0, 1.0, 1.0, 0.0]}
    first, second = gdpo_advantages(parts, [0] * 4).advantages[:2]
    assert abs(first - second) > 0.2
    whole = group_advantages([1.0, 1.0, 2.0, 1.0], [0] * 4).advantages
    assert whole[0] == whole[1]


def test_gdpo_of_constant_missing_and_absent_parts():
    parts = {"a": [1.0, 1.0, None, None, 0.0, 1.0], "b": [2.0, 2.0, None, None, 0.0, 0.0]}
    result = gdpo_advantages(parts, ["x", "x", "y", "y", "z", "z"])
    assert result.constant.tolist() == [True, False, False]
    assert result.too_few.tolist() == [False, True, False]
    assert (result.advantages[:4] == 0).all()
    assert result.advantages[4] == -result.advantages[5] != 0
    with pytest.raises(ValueError, match="the rewards have no parts"):
        gdpo_advantages({}, [0, 0])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_equals_the_choices_written_down_for_100_batches(k):
    rng = np.random.default_rng(k)
    for _ in range(100):
        rewards, ids, _ = random_batch(rng)
        got = pass_at_k_advantages(rewards, ids, k=k)
        np.testing.assert_allclose(got.advantages, oracle.pass_at_k_advantages(rewards, ids, k), rtol=1e-7, atol=1e-9)
        counts = [np.isfinite(rewards[ids == group]).sum() for group in got.group_ids]
        assert got.too_few.tolist() == [count < 2 or count <= k for count in counts]


def test_pass_at_k_of_zeros_and_ones_is_that_of_the_paper():
    right, wrong, k = 3, 5, 4
    size = right + wrong
    failed = math.comb(wrong, k) / math.comb(size, k)
    spread = math.sqrt(failed * (1 - failed))
    with_wrong = 1 - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
    got = pass_at_k_advantages([1.0] * right + [0.0] * wrong, [0] * size, k=k, eps=0.0).advantages
    np.testing.assert_allclose(got[:right], failed / spread, rtol=1e-12)
    np.testing.assert_allclose(got[right:], (with_wrong - (1 - failed)) / spread, rtol=1e-9)
    with pytest.raises(ValueError, match="k of pass@k must be at least 1, got 0"):
        pass_at_k_advantages([1.0], [0], k=0)


def test_pass_at_1_is_the_usual_advantage():
    rng = np.random.default_rng(9)
    rewards, ids = rng.normal(size=24), np.repeat(np.arange(3), 8)
    want = group_advantages(rewards, ids, ddof=0).advantages
    np.testing.assert_allclose(pass_at_k_advantages(rewards, ids, k=1).advantages, want, rtol=1e-6)
