"""What the terminal tasks are worth after commands that somebody may think of, in real sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from envs.terminal_test.env import TerminalTest
from hermes_jax.data.trajectory import Episode, Outcome
from hermes_jax.rollout.environment import Item, Reward
from hermes_jax.tools.context import make_context
from hermes_jax.tools.worker import WorkerServer

ENVIRONMENT = TerminalTest()
EPISODE = Episode(task_id="t", member=0, trajectories=(), outcome=Outcome.COMPLETED)


@pytest.fixture(scope="module")
def server() -> Iterator[WorkerServer]:
    with WorkerServer() as server:
        yield server


def task(family: str) -> Item:
    return next(item for item in map(ENVIRONMENT.train_item, range(1000)) if item["family"] == family)


def rewarded(server: WorkerServer, item: Item, command: str) -> Reward:
    """The reward after one command, in which A and B stand for the task's source and target."""
    source = next(iter(item["files"]), "")

    async def run() -> Reward:
        ctx = make_context(server)
        try:
            await ENVIRONMENT.prepare(item, [], ctx)
            await ctx.terminal(command.replace("A", source).replace("B", item["target"]), 20)
            return await ENVIRONMENT.compute_reward(item, EPISODE, ctx)
        finally:
            await ctx.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("family", "command", "reward"),
    [
        ("copy", "cp A B", 1.0),
        ("copy", "cat A > B", 1.0),
        ("copy", "mv A B", 0.1),
        ("copy", "cp A B; echo more >> B", 0.1),
        ("copy", "ln -s A B", 0.0),
        ("copy", "ln A B", 0.0),
        ("copy", "mv A B; ln -s B A", 0.1),
        ("copy", "true", 0.0),
        ("rename", "mv A B", 1.0),
        ("rename", "cp A B; rm A", 1.0),
        ("rename", "ln A B; rm A", 1.0),
        ("rename", "cp A B", 0.1),
        ("rename", "ln A B", 0.0),
        ("rename", "mv A B; ln -s B A", 0.1),
        ("rename", "true", 0.0),
    ],
)
def test_a_link_is_no_copy(server: WorkerServer, family: str, command: str, reward: float) -> None:
    result = rewarded(server, task(family), command)
    assert result.total == reward
    assert result.success is (reward == 1.0)
