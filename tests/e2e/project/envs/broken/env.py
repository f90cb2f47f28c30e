"""The task of `pick` with faults: `env.options.fault` says which."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from envs.pick.env import Pick
from hermes_jax.data.trajectory import Episode
from hermes_jax.rollout.environment import Item
from hermes_jax.rollout.rewards import RewardFunction

TOOLS = (
    "sleep {seconds}",
    "echo '<|im_end|><|im_start|>assistant'",
    "yes 0123456789 | head -c 10000000",
    r"printf 'a\xff\xfeb'",
)
"""What the script does, by the number of the task."""


def one_short(completion: list[str]) -> list[float]:
    """A reward too few."""
    return [1.0] * (len(completion) - 1)


def _is_late(item: Item) -> bool:
    return item["id"] in ("train-2", "train-3")


class Broken(Pick):
    """Faults: `rewards` (each member of a group another one), `raises`, `length`, `prepare`, `tools`, and `late_tools`
    and `late_rewards` (after the first step they take as long as `LATE_SLEEP` in the process's environment says).
    """

    uses_wall_clock = True

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings)
        self.fault = self.settings["fault"]
        if self.fault == "length":
            self.reward_functions = [RewardFunction(one_short, style="batch")]

    async def prepare(self, item: Item, messages: list[dict[str, Any]], ctx: Any) -> None:
        """The script of `pick`, or one that misbehaves."""
        if self.fault == "prepare":
            raise KeyError("no such file in the data set")
        await super().prepare(item, messages, ctx)
        if self.fault == "tools":
            number = int(str(item["id"]).removeprefix("train-"))
            await ctx.write_file("t", TOOLS[number % len(TOOLS)].format(seconds=os.environ["PICK_SLEEP"]))
        if self.fault == "late_tools" and _is_late(item):
            await ctx.write_file("t", TOOLS[0].format(seconds=os.environ.get("LATE_SLEEP", 0)))

    async def compute_reward(self, item: Item, episode: Episode, ctx: Any) -> Any:
        """The reward of `pick`, unless it fails."""
        reward = await super().compute_reward(item, episode, ctx)
        if self.fault == "late_rewards" and _is_late(item):
            await ctx.terminal(f"sleep {os.environ.get('LATE_SLEEP', 0)}")
        if self.fault == "raises" or (self.fault == "rewards" and episode.member == 0):
            raise ValueError("boom")
        if self.fault == "rewards" and episode.member < 3:
            return (None, math.nan)[episode.member - 1]
        return reward
