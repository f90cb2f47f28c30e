"""From episodes to advantages and loss masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hermes_jax.data.trajectory import Episode, Group, Outcome, Trajectory
from hermes_jax.learner.signal import Overlong, make_signal
from tests.objectives import oracle

KEEP = dict.fromkeys(Outcome, "keep")


def episode(member: int, reward: float | None, *, sampled: int = 3, outcome: Outcome = Outcome.COMPLETED) -> Episode:
    mask = np.arange(sampled + 2) >= 2
    turn = np.where(mask, 0, -1)
    trajectory = Trajectory(np.arange(sampled + 2), mask, np.where(mask, -1.0, 0.0), np.ones(sampled + 2), turn, turn)
    return Episode("task", member, (trajectory,), outcome, reward)


def signal(*episodes: Episode, outcome_policy=KEEP, method: str = "group_mean", **options):
    group = Group("task", episodes)
    return make_signal([group], method=method, outcome_policy=outcome_policy, penalised_reward=-1.0, **options)


def test_the_soft_punishment_counts_sampled_tokens():
    overlong = Overlong(max_tokens=10, cache=4, penalty=2.0)
    lengths = (6, 7, 10, 12)
    punished = [1.0, 1.0 - 2.0 * 1 / 4, -1.0, -1.0]
    found = signal(*(episode(n, 1.0, sampled=length) for n, length in enumerate(lengths)), overlong=overlong)
    np.testing.assert_allclose(found.advantages, np.array(punished) - np.mean(punished))


def test_the_soft_punishment_leaves_missing_and_replaced_rewards_alone():
    overlong = Overlong(max_tokens=4, cache=4)
    policy = KEEP | {Outcome.LENGTH: "penalise"}
    found = signal(
        episode(0, None, sampled=4),
        episode(1, 5.0, sampled=4, outcome=Outcome.LENGTH),
        episode(2, 1.0, sampled=4),
        outcome_policy=policy,
        overlong=overlong,
    )
    np.testing.assert_allclose(found.advantages, [0.0, -0.5, 0.5])


def test_overlong_filtering_is_an_outcome_policy():
    policy = KEEP | {Outcome.LENGTH: "mask"}
    found = signal(episode(0, 1.0), episode(1, 0.0, outcome=Outcome.LENGTH), outcome_policy=policy)
    np.testing.assert_allclose(found.advantages, [0.5, -0.5])
    assert [sequence.advantage for sequence in found.sequences] == [0.5], "it counts and is not trained"


@pytest.mark.parametrize("reward", [0.0, 2.0])
def test_a_group_of_one_with_batch_norm(reward):
    groups = [Group(f"task {n}", (episode(0, value),)) for n, value in enumerate([reward, 1.0])]
    found = make_signal(groups, method="batch_norm", outcome_policy=KEEP, penalised_reward=0.0)
    np.testing.assert_allclose(found.advantages, np.array([1, -1]) * np.sign(reward - 1) / np.sqrt(2), rtol=1e-6)


def test_gdpo_looks_at_the_parts_of_counted_rewards_only():
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0}, {"a": 5.0, "b": 5.0}]
    rewards = [1.0, 1.0, 1.0, None]
    episodes = [replace(episode(n, r), reward_parts=p) for n, (r, p) in enumerate(zip(rewards, parts, strict=True))]
    found = signal(*episodes, method="gdpo").advantages
    nan = np.nan
    want = oracle.gdpo_advantages({"a": [1.0, 0.0, 1.0, nan], "b": [0.0, 1.0, nan, nan]}, [0] * 4)
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-9)
    assert found[0] != found[1]


def test_pass_at_k():
    rewards = [1.0, 0.0, 0.0, 2.0, None]
    found = signal(*(episode(n, r) for n, r in enumerate(rewards)), method="pass_at_k", pass_k=2).advantages
    want = oracle.pass_at_k_advantages([np.nan if r is None else r for r in rewards], [0] * 5, 2)
    np.testing.assert_allclose(found, want, rtol=1e-7, atol=1e-9)
