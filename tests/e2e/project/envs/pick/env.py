"""A task that takes a policy seconds to learn: run a script with the right letter. The script takes its own time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_jax.data.trajectory import Episode
from hermes_jax.rollout.environment import Environment, Item, Reward

LETTERS = "abc"
SCRIPT = """sleep {seconds}
echo $1 >> said
echo ok $1
"""


class Pick(Environment):
    """Reward 1 for the first letter, 0.5 for the second, else 0.

    In the environment of the process, `PICK_SLEEP` and (for held-out tasks) `PICK_SLEEP_HELD_OUT` say how long the
    script sleeps (s, a text for `sleep`), and `PICK_TRACE` names a file that gets a line with every reward.
    """

    def train_item(self, index: int) -> Item:
        """A task that differs from its neighbours in its words only."""
        return {"id": f"train-{index}", "prompt": f"say {LETTERS[0]} {index * 7 % 100}"}

    def eval_items(self) -> Sequence[Item]:
        """Held-out tasks."""
        return [{"id": f"held-out-{n}", "prompt": f"say {LETTERS[0]} {n + 100}"} for n in range(20)]

    def format_prompt(self, item: Item) -> str:
        """What the user asks."""
        return str(item["prompt"])

    async def prepare(self, item: Item, messages: list[dict[str, Any]], ctx: Any) -> None:
        """Puts the script there."""
        variable = "PICK_SLEEP_HELD_OUT" if item["id"].startswith("held-out") else "PICK_SLEEP"
        await ctx.write_file("t", SCRIPT.format(seconds=os.environ.get(variable, "0.0$((RANDOM % 6))")))

    async def compute_reward(self, item: Item, episode: Episode, ctx: Any) -> Reward:
        """What was said, from the sandbox."""
        await ctx.kill_all()
        try:
            said = (await ctx.read_file("said")).split()
        except OSError:
            said = []
        if trace := os.environ.get("PICK_TRACE"):
            with open(trace, "a") as file:
                file.write(f"{item['id']}\n")
        value = 1.0 if "a" in said else 0.5 if "b" in said else 0.0
        return Reward(value, {"calls": float(len(said))}, success=value == 1.0)

    def demonstrate(self, item: Item, seed: int) -> Sequence[Sequence[Mapping[str, Any]]]:
        """Any of the letters, each as often."""
        letter = LETTERS[seed % len(LETTERS)]
        call = json.dumps({"name": "terminal", "arguments": {"command": f"bash t {letter}"}})
        return [
            [
                {"role": "user", "content": item["prompt"]},
                {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
                {"role": "tool", "content": f"ok {letter}"},
                {"role": "assistant", "content": "done"},
            ]
        ]
