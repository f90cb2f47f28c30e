"""From episodes to advantages and loss masks."""

from __future__ import annotations

import numpy as np
import pytest

from hermes_jax.data.trajectory import Episode, Group, Outcome, Trajectory
from hermes_jax.learner.signal import Overlong, make_signal

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
