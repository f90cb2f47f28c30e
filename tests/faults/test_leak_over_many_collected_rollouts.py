"""Scenario `leak-over-many-rollouts` through the collector: whole episodes; every fifth goes wrong somewhere."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter

from hermes_jax.data.trajectory import Outcome
from hermes_jax.engines.base import EngineError
from hermes_jax.rollout.agent import Agent, EpisodeLimits
from hermes_jax.rollout.collect import Collector, Gate, collect_groups
from hermes_jax.rollout.environment import Environment
from hermes_jax.rollout.parsers import get_parser
from hermes_jax.tools.context import make_context
from hermes_jax.tools.registry import resolve_toolsets
from hermes_jax.tools.sandbox import SandboxSettings
from hermes_jax.tools.worker import WorkerServer
from tests.faults.test_leak_over_many_rollouts import SCENARIO, counts
from tests.rollout.fakes import Reply, ScriptedEngine
from tests.rollout.test_agent_loop import RENDERER, call, say

EVERY = 5
FAULTS = ("malformed", "unknown", "hangs", "prepare", "verifier", "engine", "too_late")


def fault(number: int) -> str:
    """What goes wrong in an episode; "" = nothing."""
    return "" if number % EVERY else FAULTS[number // EVERY % len(FAULTS)]


def run(command: str, timeout_s: float = 20.0) -> Reply:
    return say(call("terminal", json.dumps({"command": command, "timeout": timeout_s})))


class Task(Environment):
    """Write a word to a file."""

    def format_prompt(self, item):
        return "Write it."

    async def prepare(self, item, messages, ctx):
        await ctx.write_file("word", str(item["number"]))
        if fault(item["number"]) == "prepare":
            raise OSError("the data set is gone")

    async def compute_reward(self, item, episode, ctx):
        await ctx.kill_all()
        if fault(item["number"]) == "verifier":
            raise ValueError("no verdict")
        try:
            return await ctx.read_file("copy") == str(item["number"])
        except FileNotFoundError:
            return False


def script(session: str) -> list[Reply]:
    number = int(session.split("/")[0])
    copy, done = run("cp word copy; sleep 60 & cat copy"), say("done")
    match fault(number):
        case "malformed":
            return [say('<tool_call>{"name": "terminal", "arguments": {</tool_call>'), copy, done]
        case "unknown":
            return [say(call("terminel", '{"command": "ls"}')), copy, done]
        case "hangs":
            return [run("trap '' TERM; sleep 60 & sleep 60", timeout_s=0.2), copy, done]
        case "engine":
            return [copy, Reply([], error=EngineError("the engine broke"))]
        case "too_late":
            return [run("sleep 60")]
        case _:
            return [copy, done]


EXPECTED = {
    "prepare": Outcome.ENV_ERROR,
    "verifier": Outcome.VERIFIER_ERROR,
    "engine": Outcome.ERROR,
    "too_late": Outcome.TIMEOUT,
}


def test_leak_over_many_collected_rollouts() -> None:
    rollouts = SCENARIO["setup"]["rollouts"]
    begun = time.monotonic()

    async def all_of_it(server: WorkerServer):
        def context(task_id, member):
            backend = "local" if int(task_id) % 10 == 3 else "bubblewrap"
            return make_context(server, SandboxSettings(backend=backend), terminal_timeout_s=20.0)

        def collector(seconds: float) -> Collector:
            limits = EpisodeLimits(context_limit=1 << 16, episode_timeout_s=seconds)
            tools = resolve_toolsets(["terminal"])
            agent = Agent(ScriptedEngine(script), RENDERER, get_parser("hermes"), tools, limits)
            return Collector(agent, Task(), context, Gate(16), 20.0, server)

        items = [{"id": str(number), "number": number} for number in range(rollouts)]
        late = [item for item in items if fault(item["number"]) == "too_late"]
        rest = [item for item in items if fault(item["number"]) != "too_late"]
        await collect_groups(collector(60.0), rest[1:5], group_size=1, seed=0, step=0)  # warm
        before = counts(server)
        groups = await collect_groups(collector(60.0), rest, group_size=1, seed=0, step=1)
        groups += await collect_groups(collector(1.0), late, group_size=1, seed=0, step=1)
        await asyncio.sleep(0)
        return before, counts(server), groups

    with WorkerServer() as server:
        before, after, groups = asyncio.run(all_of_it(server))

    assert len(groups) == rollouts
    for group in groups:
        [episode] = group.episodes
        kind = fault(int(group.task_id))
        assert episode.outcome is EXPECTED.get(kind, Outcome.COMPLETED), episode
        assert (episode.reward == 1.0) == (kind not in EXPECTED), episode
        assert (episode.error is None) == (kind not in EXPECTED), episode
    counters = Counter()
    for group in groups:
        counters.update(group.episodes[0].counters)
    kinds = Counter(fault(number) for number in range(rollouts))
    assert counters["malformed_calls"] == kinds["malformed"] > 0
    assert counters["unknown_tools"] == kinds["unknown"] > 0
    assert counters["tool_timeouts"] == kinds["hangs"] > 0

    expected = SCENARIO["expected"]
    for name in ("threads", "server_threads", "asyncio_tasks"):
        assert after[name] == before[name], name
    for name in ("files", "server_files"):
        assert after[name] - before[name] <= expected["file_descriptors"]["growth_max"], name
    assert after["temporary"] - before["temporary"] == expected["temporary_directories"]
    assert after["processes"] == 0
    assert time.monotonic() - begun < SCENARIO["bound_s"]
