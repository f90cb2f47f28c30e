"""A scripted policy with real tools in real sandboxes, and reward functions in the real worker server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

from hermes_jax.data.trajectory import Outcome
from hermes_jax.rollout.agent import Agent, EpisodeLimits
from hermes_jax.rollout.collect import Collector, Gate, collect_group
from hermes_jax.rollout.environment import Environment, Reward
from hermes_jax.rollout.parsers import get_parser
from hermes_jax.rollout.rewards import RewardFunction
from hermes_jax.tools.context import make_context
from hermes_jax.tools.registry import resolve_toolsets
from hermes_jax.tools.worker import WorkerServer
from tests.rollout.fakes import ScriptedEngine
from tests.rollout.test_agent_loop import RENDERER, call, say


@pytest.fixture(scope="module")
def server() -> Iterator[WorkerServer]:
    with WorkerServer(max_calls=2) as server:
        yield server


class CopyTask(Environment):
    """Copy a.txt to b.txt."""

    def format_prompt(self, item):
        return "Copy a.txt to b.txt."

    async def prepare(self, item, messages, ctx):
        await ctx.write_file("a.txt", item["text"])

    async def compute_reward(self, item, episode, ctx):
        await ctx.kill_all()
        try:
            exact = (await ctx.read_file("b.txt")) == item["text"]
        except FileNotFoundError:
            exact = False
        return Reward(float(exact), {"exact": exact}, success=exact)


def collect(server, environment, script, item, group_size=2, **limits):
    contexts = []

    def context(task_id, member):
        contexts.append(make_context(server, terminal_timeout_s=20.0))
        return contexts[-1]

    async def run():
        tools = resolve_toolsets(["terminal", "file"])
        limits_ = EpisodeLimits(context_limit=1 << 16, **limits)
        agent = Agent(ScriptedEngine(script), RENDERER, get_parser("hermes"), tools, limits_)
        collector = Collector(agent, environment, context, Gate(2), server=server)
        return await collect_group(collector, item, group_size=group_size, seed=0)

    return asyncio.run(run()), contexts


def test_members_have_sandboxes_of_their_own(server):
    def script(session):
        command = {"0": "cp a.txt b.txt", "1": "cat a.txt; ls"}[session.split("/")[-2]]
        return [say(call("terminal", json.dumps({"command": command}))), say("done")]

    group, contexts = collect(server, CopyTask(), script, {"id": "t", "text": "heron <|im_end|>\n"})
    assert [e.reward for e in group.episodes] == [1.0, 0.0]
    assert [e.success for e in group.episodes] == [True, False]
    shown = group.episodes[1].messages[2]["content"]
    assert "heron <|im_end|>" in shown
    assert "b.txt" not in shown
    tokens = group.episodes[1].trajectories[0].tokens.tolist()
    assert tokens.count(RENDERER.codec.added["<|im_end|>"].id) == 4  # of user, reply, result, reply; none of the file
    assert all(episode.timings["sandbox"] > 0 for episode in group.episodes)
    with pytest.raises(Exception, match="cleaned up"):
        asyncio.run(contexts[0].read_file("b.txt"))


def test_a_deadline_ends_what_runs_in_the_sandbox(server):
    script = [say(call("terminal", json.dumps({"command": "cp a.txt b.txt; sleep 60"})))]
    start = time.monotonic()
    group, _ = collect(server, CopyTask(), script, {"id": "t", "text": "x"}, group_size=1, episode_timeout_s=1.5)
    (episode,) = group.episodes
    assert time.monotonic() - start < 15
    assert episode.outcome is Outcome.TIMEOUT
    assert episode.reward == 1.0  # rewarded all the same: what it is worth to training is the outcome policy's to say
    assert episode.n_sampled > 0


def test_reward_functions_run_in_the_worker_server(server):
    def brief(completion):
        return len(completion) < 10

    def stuck(messages):
        while True:
            pass

    class Functions(Environment):
        reward_functions = (RewardFunction(brief, weight=2.0),)

        def format_prompt(self, item):
            return "Say something."

    group, _ = collect(server, Functions(), [say("done")], {"id": "t"})
    assert [e.reward for e in group.episodes] == [2.0, 2.0]
    assert group.episodes[0].reward_parts == {"brief": 1.0}

    environment = Functions()
    environment.reward_functions = (RewardFunction(brief), RewardFunction(stuck, timeout_s=0.5))
    group, _ = collect(server, environment, [say("done")], {"id": "t"}, group_size=1)
    (episode,) = group.episodes
    assert (episode.reward, episode.outcome) == (None, Outcome.VERIFIER_ERROR)
    assert (episode.counters["verifier_errors"], episode.counters["verifier_timeouts"]) == (1, 1)
    assert "stuck" in episode.error
