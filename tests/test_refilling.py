"""Dynamic sampling: which groups are replaced, when it ends, and what is trained on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hermes_jax import config as cfg
from hermes_jax.batches import group_signal
from hermes_jax.data.trajectory import Group
from hermes_jax.refilling import Collected, refill, tasks_per_step
from tests.learner.test_signal import episode

USEFUL, CONSTANT, MISSING = (1.0, 0.0), (1.0, 1.0), (1.0, None)


def group(place: int, rewards: tuple[float | None, ...]) -> Group:
    return Group(f"task {place}", tuple(episode(n, reward) for n, reward in enumerate(rewards)))


def collect(*kinds: tuple[float | None, ...], wanted: int = 2, times: int = 2) -> tuple[Collected, list[tuple]]:
    """The step whose tasks give these rewards, in order; and what was asked for after the first collection."""
    config = cfg.load(overrides=[f"env.groups_per_step={wanted}", f"grpo.dynamic_sampling={times}", "env.group_size=2"])
    assert tasks_per_step(config) == wanted * (1 + times)
    groups = [group(place, rewards) for place, rewards in enumerate(kinds)]
    asked = []

    async def play(place: int, count: int) -> list[Group]:
        asked.append((place, count))
        return groups[place : place + count]

    return asyncio.run(refill(groups[:wanted], play, config)), asked


@pytest.mark.parametrize(
    ("kinds", "kept", "asked"),
    [
        ((USEFUL, USEFUL), [0, 1], []),
        ((CONSTANT, USEFUL, USEFUL), [1, 2], [(2, 1)]),
        ((MISSING, USEFUL, USEFUL), [1, 2], [(2, 1)]),
        ((CONSTANT, CONSTANT, USEFUL, CONSTANT, USEFUL), [2, 4], [(2, 2), (4, 1)]),
        ((CONSTANT, USEFUL, CONSTANT, CONSTANT, CONSTANT, CONSTANT), [1], [(2, 1), (3, 1), (4, 1), (5, 1)]),
        ((CONSTANT,) * 6, [0, 1], [(2, 2), (4, 2)]),
    ],
)
def test_groups_without_variance_are_replaced_until_the_budget_is_used_up(kinds, kept, asked):
    collected, found = collect(*kinds)
    assert (collected.kept, found) == (kept, asked)
    assert [g.task_id for g in collected.groups] == [f"task {place}" for place in kept]
    count = len(collected.played)
    assert collected.metrics() == {
        "groups/count": count,
        "groups/trained": len(kept),
        "groups/constant": kinds[:count].count(CONSTANT) / count,
        "groups/too_few": kinds[:count].count(MISSING) / count,
    }


def test_switched_off_everything_is_kept():
    collected, asked = collect(CONSTANT, USEFUL, times=0)
    assert (collected.kept, asked) == ([0, 1], [])


def test_advantages_stand_beside_the_episodes_that_were_played():
    collected, _ = collect(CONSTANT, USEFUL, USEFUL)
    signal = group_signal(collected.groups, cfg.load(overrides=["grpo.advantage=group_mean"]))
    assert [e.reward for e in collected.episodes] == [1, 1, 1, 0, 1, 0]
    np.testing.assert_allclose(collected.advantages(signal), [0, 0, 0.5, -0.5, 0.5, -0.5])
