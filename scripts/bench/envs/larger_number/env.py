"""The toy task of the end-to-end benchmark as an environment: one turn, no tools."""

from __future__ import annotations

from typing import Any

import toy_task

from hermes_jax.data.trajectory import Episode
from hermes_jax.rollout.environment import Environment, Item


class LargerNumber(Environment):
    """Reply with a number larger than N."""

    name = "larger_number"

    def train_item(self, index: int) -> Item:
        """Task number `index`."""
        return {"id": str(index), "index": index}

    def format_prompt(self, item: Item) -> str:
        """What the user asks."""
        return toy_task.prompt(item["index"])

    async def compute_reward(self, item: Item, episode: Episode, ctx: Any) -> float:
        """The reward function that the other side uses, too."""
        return toy_task.reward(str(episode.messages[-1]["content"]), toy_task.bound(item["index"]))
