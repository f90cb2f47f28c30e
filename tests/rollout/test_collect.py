"""Groups: isolation, order, bounds, seeds, sandboxes, rewards."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from hermes_jax.data.trajectory import Outcome
from hermes_jax.engines.base import EngineError
from hermes_jax.rollout.agent import Agent, EpisodeLimits
from hermes_jax.rollout.collect import Collector, Gate, collect_group, collect_groups
from hermes_jax.rollout.environment import Environment, Reward
from hermes_jax.rollout.parsers import get_parser
from hermes_jax.rollout.rewards import RewardFunction
from tests.rollout.fakes import FakeClock, Reply, ScriptedEngine
from tests.rollout.test_agent_loop import RENDERER, call, say, tools


class Context:
    """A sandbox's stand-in that knows whether it was closed."""

    def __init__(self, task_id, member):
        self.task_id, self.member, self.closed = task_id, member, 0

    async def cleanup(self):
        await asyncio.sleep(0)
        self.closed += 1


class Echo(Environment):
    """The prompt is the item's text; the reward is what the item says."""

    def format_prompt(self, item):
        return item["text"]

    async def compute_reward(self, item, episode, ctx):
        value = item.get("reward", 1.0)
        return value(episode, ctx) if callable(value) else value


def collect(items, environment=None, replies=None, group_size=2, limit=8, clock=None, seed=7, **options):
    contexts = []

    def make_context(task_id, member):
        contexts.append(Context(task_id, member))
        return contexts[-1]

    async def run():
        engine = ScriptedEngine(replies or [say("done")], clock)
        agent = Agent(engine, RENDERER, get_parser("hermes"), options.pop("tools", {}), clock=clock or FakeClock())
        gate = Gate(limit)
        collector = Collector(agent, environment or Echo(), make_context, gate, **options)
        groups = await collect_groups(collector, items, group_size=group_size, seed=seed, step=3)
        return groups, engine, gate

    groups, engine, gate = asyncio.run(run())
    assert gate.in_flight == 0
    assert all(ctx.closed == 1 for ctx in contexts)
    return groups, engine, gate


def test_groups_and_members_keep_their_order():
    groups, engine, _ = collect([{"id": f"t{i}", "text": f"task {i}"} for i in range(3)])
    assert [g.task_id for g in groups] == ["t0", "t1", "t2"]
    assert [[e.member for e in g.episodes] for g in groups] == [[0, 1]] * 3
    assert all(e.reward == 1.0 for g in groups for e in g.episodes)
    assert len({r.sampling.seed for r in engine.requests}) == 6
    assert len({r.session for r in engine.requests}) == 6
    assert set(engine.released) == {r.session for r in engine.requests}


def test_the_same_task_twice_in_a_step_is_played_with_other_seeds_and_sessions():
    _, engine, _ = collect([{"id": "t", "text": "x"}] * 2)
    assert len({r.sampling.seed for r in engine.requests}) == len({r.session for r in engine.requests}) == 4


def test_seeds_follow_from_run_step_task_and_member():
    items = [{"id": "t", "text": "x"}]
    seeds = [[r.sampling.seed for r in collect(items, seed=seed)[1].requests] for seed in (7, 7, 8)]
    assert seeds[0] == seeds[1]
    assert not set(seeds[0]) & set(seeds[2])


def test_at_most_so_many_at_once():
    clock = FakeClock()
    items = [{"id": f"t{i}", "text": "x"} for i in range(5)]
    _, _, gate = collect(items, replies=[say("done", takes_s=1.0)], group_size=4, limit=3, clock=clock)
    assert (gate.max_in_flight, gate.capacity) == (3, 3)
    assert clock.now() == pytest.approx(7.0)  # 20 episodes, three at a time


@pytest.mark.parametrize("where", ["prepare", "format_prompt"])
def test_an_environment_that_raises_takes_nobody_with_it(where):
    class Raises(Echo):
        def fail(self):
            raise RuntimeError("out of tea")

        def format_prompt(self, item):
            return self.fail() if where == "format_prompt" and item["id"] == "t1" else item["text"]

        def prepare(self, item, messages, ctx):
            if where == "prepare" and item["id"] == "t1" and ctx.member == 0:
                self.fail()

    groups, _, _ = collect([{"id": f"t{i}", "text": "x"} for i in range(3)], Raises())
    failed = [e for g in groups for e in g.episodes if e.outcome is Outcome.ENV_ERROR]
    assert [(e.task_id, e.member) for e in failed] == ([("t1", 0)] if where == "prepare" else [("t1", 0), ("t1", 1)])
    assert all("task t1" in e.error and "RuntimeError: out of tea" in e.error for e in failed)
    assert sum(e.outcome is Outcome.COMPLETED for g in groups for e in g.episodes) == 6 - len(failed)
    assert all(e.reward is None and not e.trajectories for e in failed)


def test_a_context_that_can_not_be_made_is_that_members_failure():
    def make_context(task_id, member):
        if member == 1:
            raise OSError("no bubblewrap")
        return Context(task_id, member)

    async def run():
        agent = Agent(ScriptedEngine([say("done")]), RENDERER, get_parser("hermes"))
        return await collect_group(Collector(agent, Echo(), make_context, Gate(2)), {"text": "x"}, group_size=3, seed=1)

    group = asyncio.run(run())
    assert [e.outcome for e in group.episodes] == [Outcome.COMPLETED, Outcome.ENV_ERROR, Outcome.COMPLETED]
    assert "OSError: no bubblewrap" in group.episodes[1].error


def test_an_engine_error_is_that_members_failure_and_is_not_tried_again():
    replies = {0: [say("done")], 1: [Reply([], error=EngineError("request 1: 500"))]}

    def script(session):
        return replies[int(session.split("/")[-2])]

    groups, engine, _ = collect([{"id": "t", "text": "x"}], replies=script)
    assert [e.outcome for e in groups[0].episodes] == [Outcome.COMPLETED, Outcome.ERROR]
    assert groups[0].episodes[1].reward is None
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("value", "reward", "success", "errors"),
    [
        (0.25, 0.25, None, 0),
        (True, 1.0, True, 0),
        (None, None, None, 0),
        (math.nan, None, None, 1),
        ("1.0", None, None, 1),
        (Reward(2.0, {"exact": 1, "speed": None}, success=True, turn_rewards=[1, 2]), 2.0, True, 0),
        (lambda episode, ctx: 1 / 0, None, None, 1),
    ],
)
def test_rewards(value, reward, success, errors):
    (group,), _, _ = collect([{"id": "t", "text": "x", "reward": value}], group_size=1)
    (episode,) = group.episodes
    assert (episode.reward, episode.success, episode.counters["verifier_errors"]) == (reward, success, errors)
    assert episode.counters["completed"] == 1
    assert episode.counters["reward_missing"] == (reward is None)
    assert episode.outcome is (Outcome.VERIFIER_ERROR if errors else Outcome.COMPLETED)
    assert bool(episode.error) == bool(errors)
    assert episode.trajectories
    if isinstance(value, Reward):
        assert episode.reward_parts == {"exact": 1.0, "speed": None}
        assert episode.turn_rewards == (1.0, 2.0)


def test_a_reward_that_takes_too_long_is_missing():
    clock = FakeClock()

    class Slow(Echo):
        async def compute_reward(self, item, episode, ctx):
            await clock.sleep(1e6)

    (group,), _, _ = collect([{"id": "t", "text": "x"}], Slow(), clock=clock, reward_timeout_s=5.0)
    assert all(e.reward is None and e.counters["verifier_timeouts"] == 1 for e in group.episodes)
    assert "longer than 5 s" in group.episodes[0].error
    assert clock.now() == 5.0


def test_a_reward_function_sees_the_sandbox_before_it_is_closed():
    seen = []

    def look(episode, ctx):
        seen.append((ctx.member, ctx.closed, episode.outcome))
        return 1.0

    collect([{"id": "t", "text": "x", "reward": look}])
    assert sorted(seen) == [(0, 0, "completed"), (1, 0, "completed")]


def test_methods_that_are_not_async_run_beside_the_event_loop():
    threads = []

    class Plain(Echo):
        def prepare(self, item, messages, ctx):
            threads.append(threading.current_thread())

        def compute_reward(self, item, episode, ctx):
            threads.append(threading.current_thread())
            return 1

    (group,), _, _ = collect([{"id": "t", "text": "x"}], Plain(), group_size=1)
    assert group.episodes[0].reward == 1.0
    assert all(thread is not threading.main_thread() for thread in threads)


def test_what_says_nothing_about_the_policy_is_not_rewarded():
    rewarded = []
    item = {"id": "t", "text": "x", "reward": lambda episode, ctx: rewarded.append(1)}
    (group,), _, _ = collect([item], replies=[Reply([5], "abort")])
    assert all(e.outcome is Outcome.ABORTED for e in group.episodes)
    assert not rewarded


def test_other_outcomes_are_rewarded():
    rewarded = []

    def reward(episode, ctx):
        rewarded.append(episode.outcome)
        return 0.5

    (group,), _, _ = collect([{"id": "t", "text": "x", "reward": reward}], replies=[Reply([5], "length")], group_size=1)
    assert (rewarded, group.episodes[0].reward) == ([Outcome.LENGTH], 0.5)


def test_cancelling_a_collection_closes_every_sandbox():
    contexts = []

    def make_context(task_id, member):
        contexts.append(Context(task_id, member))
        return contexts[-1]

    async def hangs(arguments, ctx):
        await asyncio.Event().wait()

    async def run():
        engine = ScriptedEngine([say(call("hangs"))])
        agent = Agent(engine, RENDERER, get_parser("hermes"), tools(hangs=hangs), EpisodeLimits())
        collector = Collector(agent, Echo(), make_context, Gate(3))
        task = asyncio.create_task(collect_groups(collector, [{"text": "x"}] * 2, group_size=2, seed=0, step=0))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1
        assert collector.gate.in_flight == 0
        assert set(engine.released) == {r.session for r in engine.requests}

    asyncio.run(run())
    assert contexts
    assert all(ctx.closed == 1 for ctx in contexts)


def test_reward_functions_want_a_worker_server():
    class Functions(Echo):
        reward_functions = (RewardFunction(len),)

    with pytest.raises(ValueError, match="need a WorkerServer"):
        collect([{"id": "t", "text": "x"}], Functions())


def test_a_gate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one episode"):
        Gate(0)
