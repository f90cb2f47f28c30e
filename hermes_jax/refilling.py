"""Dynamic sampling (DAPO, arXiv:2503.14476): groups without variance teach nothing, others are collected for them.

Which tasks a step may see is a function of its number: those of its first collection, then a reserve for refills. So
nothing needs to be saved, and a step that is collected again is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hermes_jax.batches import group_signal
from hermes_jax.config import Config
from hermes_jax.data.trajectory import Episode, Group
from hermes_jax.learner.signal import Signal

Play = Callable[[int, int], Awaitable[list[Group]]]
"""(place, count) -> the groups of so many tasks of the step, from a place in its order on."""


@dataclass(frozen=True, eq=False)
class Collected:
    """The groups of a step.

    Args:
        played: all of them, in the order of their tasks.
        kept: places of those that are trained on.
        signal: of all that were played.
        wanted: how many should have been kept.
    """

    played: list[Group]
    kept: list[int]
    signal: Signal
    wanted: int

    @property
    def groups(self) -> list[Group]:
        """Those that are trained on."""
        return [self.played[at] for at in self.kept]

    @property
    def episodes(self) -> list[Episode]:
        """All episodes that were played."""
        return [episode for group in self.played for episode in group.episodes]

    def advantages(self, signal: Signal) -> list[float]:
        """One per episode that was played, 0 for those that are not trained on; `signal` is that of `groups`."""
        ends = np.cumsum([0, *(len(group.episodes) for group in self.played)])
        found = np.zeros(ends[-1])
        found[np.concatenate([np.arange(ends[at], ends[at + 1]) for at in self.kept])] = signal.advantages
        return found.tolist()

    def metrics(self) -> dict[str, float]:
        """Under their documented names."""
        count = len(self.played)
        return {
            "groups/count": count,
            "groups/trained": len(self.kept),
            "groups/constant": self.signal.groups_constant / count,
            "groups/too_few": self.signal.groups_too_few / count,
        }


def tasks_per_step(config: Config) -> int:
    """Tasks that belong to a step, the reserve of `grpo.dynamic_sampling` included."""
    return config.env.groups_per_step * (1 + config.grpo.dynamic_sampling)


async def refill(played: Sequence[Group], play: Play, config: Config) -> Collected:
    """Collects other groups in place of those without variance, until there are enough or the step's tasks are used up.

    Then the first `env.groups_per_step` groups with variance are trained on, fewer if there are fewer; if none has any,
    the first collection as it is. Without `grpo.dynamic_sampling` that is always so.

    Args:
        played: the step's first collection.
        play: collects more.
        config: of the run.
    """
    groups, wanted = list(played), len(played)
    signal = await asyncio.to_thread(group_signal, groups, config)
    if not config.grpo.dynamic_sampling:
        return Collected(groups, list(range(wanted)), signal, wanted)
    while True:
        useful = np.flatnonzero(~signal.degenerate).tolist()
        missing = min(wanted - len(useful), tasks_per_step(config) - len(groups))
        if missing <= 0:
            return Collected(groups, useful[:wanted] or list(range(wanted)), signal, wanted)
        groups += await play(len(groups), missing)
        signal = await asyncio.to_thread(group_signal, groups, config)
