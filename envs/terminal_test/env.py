"""Tasks for a terminal: write, number, add, copy, rename and count, checked by what is in the files afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from envs.terminal_test.tasks import Task, make_task, scripted_command
from hermes_jax.data.trajectory import Episode
from hermes_jax.rollout.environment import Environment, Item, Reward

READ_LIMIT_BYTES = 100_000


class TerminalTest(Environment):
    """The terminal environment.

    Reward: 1.0 if the target file holds exactly what was asked for (white space around it aside) and nothing else about
    the task is wrong; a part of it (0.5; 0.1 for copy, rename and count) if the target contains it; else 0.
    """

    name = "terminal_test"

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings)
        if unknown := set(self.settings) - {"eval_items"}:
            raise ValueError(f"env.options: terminal_test knows eval_items only, not {', '.join(sorted(unknown))}")
        self.n_eval = int(self.settings.get("eval_items", 1000))

    def train_item(self, index: int) -> Item:
        """Task number `index` of the training split."""
        return {"id": f"train-{index}", **asdict(make_task("train", index))}

    def eval_items(self) -> Sequence[Item]:
        """The first tasks of the held-out split."""
        return [{"id": f"held-out-{n}", **asdict(make_task("held_out", n))} for n in range(self.n_eval)]

    def format_prompt(self, item: Item) -> str:
        """What the user asks."""
        return str(item["prompt"])

    async def prepare(self, item: Item, messages: list[dict[str, Any]], ctx: Any) -> None:
        """Writes the files that the task starts with."""
        for path, content in item["files"].items():
            await ctx.write_file(path, content)

    async def compute_reward(self, item: Item, episode: Episode, ctx: Any) -> Reward:
        """Ends all processes of the episode, then reads the target inside the sandbox."""
        if not ctx.started:  # no tool was called and no file was there: nothing can have been done
            return Reward(0.0, {"exact": 0.0, "contained": 0.0}, success=False)
        await ctx.kill_all()
        content = await _read(ctx, item["target"])
        contained = content is not None and item["expected"] in content
        exact = content is not None and content.strip() == item["expected"] and await _side_conditions(ctx, item)
        total = 1.0 if exact else item["partial"] if contained else 0.0
        return Reward(total, {"exact": float(exact), "contained": float(contained)}, success=exact)

    def demonstrate(self, item: Item, seed: int) -> Sequence[Sequence[Mapping[str, Any]]]:
        """One scripted episode: a command as a beginner might write it, right or wrong, and what the tool answers."""
        fields = {key: item[key] for key in Task.__dataclass_fields__}
        command, output = scripted_command(Task(**fields), np.random.default_rng(seed))
        call = json.dumps({"name": "terminal", "arguments": {"command": command}})
        return [
            [
                {"role": "user", "content": item["prompt"]},
                {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
                {"role": "tool", "content": output},
                {"role": "assistant", "content": "done"},
            ]
        ]


async def _read(ctx: Any, path: str, *, links: bool = False) -> str | None:
    """Text of a file in the sandbox; None if there is no such regular file, or it is too large to be an answer.

    A link is none either (unless `links`): whoever gives a file a second name has copied nothing.
    """
    try:
        return str(await ctx.read_file(path, READ_LIMIT_BYTES, links=links))
    except OSError:
        return None


async def _side_conditions(ctx: Any, item: Item) -> bool:
    kept = item["must_exist"] is None or await _read(ctx, item["must_exist"]) is not None
    gone = item["must_not_exist"] is None or await _read(ctx, item["must_not_exist"], links=True) is None
    return kept and gone
