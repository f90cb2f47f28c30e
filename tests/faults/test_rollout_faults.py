"""Faults of the engine and tool kinds, as far as they concern collection; the engine is an in-process script."""

from __future__ import annotations

import asyncio
import time

from hermes_jax.data.trajectory import Outcome
from hermes_jax.engines.base import EngineError
from hermes_jax.rollout.agent import Agent, EpisodeLimits
from hermes_jax.rollout.agent_loop import run_episode
from hermes_jax.rollout.parsers import get_parser
from tests.rollout.fakes import FakeClock, Reply, ScriptedEngine
from tests.rollout.test_agent_loop import RENDERER, call, say, tools
from tests.rollout.test_collect import Echo, collect


def test_deadline_over_phases():
    """Sandbox start, model and tool take 6 s each; the episode's 10 s end it in the second of them, and not later."""
    for slow, (model_s, sandbox_s) in {"model": (6, 6), "tool": (3, 3)}.items():
        clock, stopped = FakeClock(), []

        async def takes_6_s(*_, clock=clock, stopped=stopped):
            try:
                await clock.sleep(6)
            finally:
                stopped.append(clock.now())

        async def start_sandbox(messages, clock=clock, seconds=sandbox_s):
            await clock.sleep(seconds)

        engine = ScriptedEngine([say(call("work"), takes_s=model_s), say("done", takes_s=model_s)], clock)
        limits = EpisodeLimits(episode_timeout_s=10)
        agent = Agent(engine, RENDERER, get_parser("hermes"), tools(work=takes_6_s), limits, clock=clock)
        start = time.monotonic()
        episode = asyncio.run(
            run_episode(agent, [{"role": "user", "content": "go"}], task_id="t", prepare=start_sandbox)
        )
        assert clock.now() == 10
        assert episode.outcome is Outcome.TIMEOUT
        assert episode.timings["total"] == 10
        assert stopped == ([10] if slow == "tool" else [])
        assert engine.in_flight == 0
        assert time.monotonic() - start < 20


def test_one_of_eight_raises():
    class Third(Echo):
        async def prepare(self, item, messages, ctx):
            if ctx.member == 2:
                raise RuntimeError("third time unlucky")

    start = time.monotonic()
    (group,), _, _ = collect([{"id": "task-17", "text": "x"}], Third(), group_size=8)
    errors = [e for e in group.episodes if e.error]
    assert [e.member for e in group.episodes] == list(range(8))
    assert sum(e.reward == 1.0 for e in group.episodes) == 7
    assert [(e.member, e.outcome) for e in errors] == [(2, Outcome.ENV_ERROR)]
    assert all(words in errors[0].error for words in ("RuntimeError", "task-17", "third time unlucky"))
    assert time.monotonic() - start < 10


def test_half_fail_counter():
    clock, answers = FakeClock(), {}

    def script(session):
        place = answers.setdefault(session, len(answers))
        bad = EngineError(f"request {session}: 400 Bad Request")
        return [Reply([], error=bad, takes_s=1.0) if place % 2 else say("done", takes_s=1.0)]

    start = time.monotonic()
    items = [{"id": f"t{i}", "text": "x"} for i in range(100)]
    groups, engine, gate = collect(items, replies=script, group_size=1, limit=8, clock=clock)
    outcomes = [g.episodes[0].outcome for g in groups]
    assert (outcomes.count(Outcome.COMPLETED), outcomes.count(Outcome.ERROR)) == (50, 50)
    assert (gate.in_flight, gate.capacity, gate.max_in_flight) == (0, 8, 8)
    assert engine.in_flight == 0
    assert all("400 Bad Request" in g.episodes[0].error for g in groups if g.episodes[0].error)
    assert time.monotonic() - start < 30


def test_seeds_differ():
    runs = [collect([{"id": "t", "text": "x"}], group_size=4, seed=7)[1] for _ in range(2)]
    seeds = [[r.sampling.seed for r in engine.requests] for engine in runs]
    assert len(set(seeds[0])) == 4
    assert seeds[0] == seeds[1]
