"""From a played episode to one with a reward, whatever the reward function does."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hermes_jax.clock import Clock
from hermes_jax.data.trajectory import Episode, Outcome
from hermes_jax.rollout.deadline import DeadlinePassed, before
from hermes_jax.rollout.environment import Environment, Item, Reward, call
from hermes_jax.rollout.rewards import RewardValue, evaluate_reward_functions, normalise_reward
from hermes_jax.tools.verifier_main import finished
from hermes_jax.tools.worker import CallFailed, CallTimedOut, WorkerServer, WorkerServerDied, prepare


@dataclass(frozen=True)
class _Score:
    """A reward as it goes into an episode: `total` may be missing, `success` unknown."""

    total: RewardValue
    parts: Mapping[str, float | None] = field(default_factory=dict)
    success: bool | None = None
    turn_rewards: tuple[float, ...] = ()


async def score_episode(
    environment: Environment,
    item: Item,
    episode: Episode,
    ctx: Any,
    *,
    timeout_s: float,
    clock: Clock,
    server: WorkerServer | None = None,
) -> Episode:
    """The episode with what `environment.compute_reward` gives it.

    A plain function runs in the worker server, if there is one, where the deadline ends whatever it does.

    An exception, a value that is no finite number and a passed deadline are failures: the reward is missing, the
    outcome `verifier_error`, the counter `verifier_errors` 1. None is a missing reward without a failure.

    Raises:
        WorkerServerDied: the server has ended, which is no failure of the reward.
    """
    start = clock.now()
    try:
        if server is None or inspect.iscoroutinefunction(environment.compute_reward):
            work = call(environment.compute_reward, item, episode, ctx)
            score = _as_score(await before(start + timeout_s, clock, work))
        else:
            score = await _score_apart(environment, item, episode, timeout_s, server)
    except DeadlinePassed:
        score = _Score(RewardValue(None, f"the reward took longer than {timeout_s:g} s", timed_out=True))
    except WorkerServerDied:
        raise
    except Exception as error:
        score = _Score(RewardValue(None, f"{type(error).__name__}: {error}"))
    timings = {**episode.timings, "reward": clock.now() - start}
    return _with_score(replace(episode, timings=timings), score)


async def score_group(
    environment: Environment, item: Item, episodes: Sequence[Episode], server: WorkerServer
) -> list[Episode]:
    """The episodes with what `environment.reward_functions` give them, called in the worker server.

    A function gets what the names of its arguments say: the item's fields, `item`, `messages`, `completion` (text of
    the last message), `outcome`, `counters`.
    """
    samples = [
        {
            **item,
            "item": dict(item),
            "messages": [dict(m) for m in episode.messages],
            "completion": episode.messages[-1].get("content", "") if episode.messages else "",
            "outcome": episode.outcome.value,
            "counters": dict(episode.counters),
        }
        for episode in episodes
    ]
    labels = [f"{episode.task_id}, member {episode.member}" for episode in episodes]
    rewards = await evaluate_reward_functions(environment.reward_functions, samples, server, labels)
    return [
        _with_score(episode, _Score(total, {name: part.value for name, part in parts.items()}))
        for episode, total, parts in zip(episodes, rewards.totals, rewards.parts, strict=True)
    ]


async def _score_apart(
    environment: Environment, item: Item, episode: Episode, timeout_s: float, server: WorkerServer
) -> _Score:
    function = prepare(functools.partial(_plain_score, environment.compute_reward), "compute_reward")
    try:
        plain = await server.call(function, dict(item), episode, timeout_s=timeout_s)
    except CallTimedOut as error:
        return _Score(RewardValue(None, f"compute_reward: {error}", timed_out=True))
    except CallFailed as error:
        return _Score(RewardValue(None, str(error)))
    total, turns = RewardValue(**plain["total"]), tuple(plain["turn_rewards"])
    return _Score(total, plain["parts"], plain["success"], turns)


def _plain_score(compute_reward: Callable[..., Any], item: Item, episode: Episode) -> dict[str, Any]:
    """Runs in the worker's child: only plain data leaves it."""
    return asdict(_as_score(finished(compute_reward(item, episode, None))))


def _as_score(value: Any) -> _Score:
    if not isinstance(value, Reward):
        return _Score(normalise_reward(value), success=value if isinstance(value, bool) else None)
    parts = {name: normalise_reward(part).value for name, part in value.parts.items()}
    success = None if value.success is None else bool(value.success)
    return _Score(normalise_reward(value.total), parts, success, tuple(map(float, value.turn_rewards)))


def _with_score(episode: Episode, score: _Score) -> Episode:
    counters = Counter(episode.counters)
    total = score.total
    counters["reward_missing"] += total.value is None
    counters["verifier_errors"] += total.failure is not None
    counters["verifier_timeouts"] += total.timed_out
    scored = replace(
        episode,
        reward=total.value,
        reward_parts=score.parts,
        success=score.success,
        turn_rewards=score.turn_rewards,
        counters=dict(counters),
    )
    if total.failure is None:
        return scored
    error = f"task {episode.task_id}, member {episode.member}: {total.failure}"
    return replace(scored, outcome=Outcome.VERIFIER_ERROR, error=error)
