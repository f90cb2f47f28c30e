"""A plain `compute_reward` runs in the worker server: whatever it does, it ends at its deadline and harms nobody."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hermes_jax.data.trajectory import Episode, Group, Outcome, Trajectory
from hermes_jax.rollout.agent import Agent
from hermes_jax.rollout.collect import Collector, Gate, collect_group
from hermes_jax.rollout.environment import Environment, Reward
from hermes_jax.rollout.parsers import get_parser
from hermes_jax.tools.worker import WorkerServer
from tests.rollout.fakes import ScriptedEngine
from tests.rollout.test_agent_loop import RENDERER, say


@pytest.fixture(scope="module")
def server() -> Iterator[WorkerServer]:
    with WorkerServer(max_calls=4) as server:
        yield server


def collect(server: WorkerServer, compute_reward, members: int = 2, timeout_s: float = 30.0, **attributes) -> Group:
    class Plain(Environment):
        def format_prompt(self, item):
            return "Say something."

    Plain.compute_reward = compute_reward
    environment = Plain({"bonus": 0.25})
    vars(environment).update(attributes)

    async def run():
        agent = Agent(ScriptedEngine([say("done")]), RENDERER, get_parser("hermes"), {})
        collector = Collector(agent, environment, lambda task, member: None, Gate(members), timeout_s, server)
        return await collect_group(collector, {"id": "t", "answer": "done"}, group_size=members, seed=0)

    return asyncio.run(run())


def test_it_sees_item_episode_and_settings_but_no_sandbox(server):
    def compute_reward(self, item, episode, ctx):
        said = episode.messages[-1]["content"] == item["answer"] and episode.trajectories[0].n_sampled > 0
        total = said + self.settings["bonus"] * episode.member
        return Reward(total, {"said": said, "none": None}, ctx is None, [1, 0.5])

    episodes = collect(server, compute_reward).episodes
    assert [e.reward for e in episodes] == [1.0, 1.25]
    assert all(e.success is True and e.reward_parts == {"said": 1.0, "none": None} for e in episodes)
    assert all(e.turn_rewards == (1.0, 0.5) for e in episodes)
    assert all(e.timings["reward"] > 0 for e in episodes)


def test_a_busy_loop_ends_at_its_deadline_and_the_others_keep_their_reward(server):
    def compute_reward(self, item, episode, ctx):
        while episode.member == 1:
            pass
        return True

    begun, threads = time.monotonic(), threading.active_count()
    good, stuck, other = collect(server, compute_reward, members=3, timeout_s=1.0).episodes
    assert time.monotonic() - begun < 20
    assert (good.reward, other.reward, good.success) == (1.0, 1.0, True)
    assert (stuck.reward, stuck.outcome) == (None, Outcome.VERIFIER_ERROR)
    assert (stuck.counters["verifier_timeouts"], stuck.counters["verifier_errors"]) == (1, 1)
    assert "member 1" in stuck.error
    assert "within 1 s" in stuck.error
    assert threading.active_count() <= threads + 1  # no thread spins on


@pytest.mark.parametrize(
    ("way", "shown"),
    [
        (lambda: sys.exit(3), "SystemExit"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), 9), "SIGKILL"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: float("nan"), "not finite"),
        (lambda: "1", "not a number"),
        (lambda: Reward(1.0, turn_rewards=["x"]), "ValueError"),
    ],
)
def test_what_goes_wrong_is_a_missing_reward(server, way, shown):
    def compute_reward(self, item, episode, ctx):
        return way()

    (episode,) = collect(server, compute_reward, members=1).episodes
    assert (episode.reward, episode.outcome) == (None, Outcome.VERIFIER_ERROR)
    assert shown in episode.error


def test_no_opinion_is_no_failure_and_a_deadline_may_be_missing(server):
    (episode,) = collect(server, lambda self, item, episode, ctx: None, members=1, timeout_s=float("inf")).episodes
    assert (episode.reward, episode.outcome) == (None, Outcome.COMPLETED)


def test_an_environment_that_cannot_travel_says_so(server):
    (episode,) = collect(server, lambda self, i, e, c: 1.0, members=1, lock=threading.Lock()).episodes
    assert episode.outcome is Outcome.VERIFIER_ERROR
    assert "'compute_reward' cannot be sent to the worker server" in episode.error


def test_episodes_and_groups_can_be_pickled():
    arrays = [np.array(x) for x in ([1, 2], [False, True], [0.0, -1.0], [1.0, 0.7], [-1, 0], [-1, 0])]
    episode = Episode("t", 0, (Trajectory(*arrays),), Outcome.COMPLETED)
    (found,) = pickle.loads(pickle.dumps(Group("t", (episode,)))).episodes
    assert found.trajectories[0].tokens.tolist() == [1, 2]
    assert (found.reward_parts, found.counters, found.timings) == ({}, {}, {})


def test_a_server_that_ends_during_a_reward_is_no_failure_of_the_reward():
    def compute_reward(self, item, episode, ctx):
        os.kill(self.settings["server"], signal.SIGKILL)
        time.sleep(30)

    with WorkerServer() as server:
        (episode,) = collect(server, compute_reward, members=1, settings={"server": server.pid}).episodes
    assert (episode.reward, episode.outcome) == (None, Outcome.ENV_ERROR)
    assert "the worker server (process" in episode.error
    assert "verifier_errors" not in episode.counters
