"""Groups of episodes: every member on its own, many at once, in order, whatever happens to one of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from hermes_jax.data.seeds import fold_seed
from hermes_jax.data.trajectory import Episode, Group, Outcome
from hermes_jax.rollout.agent import Agent
from hermes_jax.rollout.agent_loop import WITHOUT_TRAJECTORIES, run_episode
from hermes_jax.rollout.chat import Message
from hermes_jax.rollout.environment import Environment, Item, call
from hermes_jax.rollout.scoring import score_episode, score_group
from hermes_jax.tools.worker import WorkerServer

MakeContext = Callable[[str, int], Any]
"""(task id, member) -> the ToolContext of one episode; its sandbox starts when it is first needed."""

T = TypeVar("T")


class Gate:
    """Lets so many episodes run at once, and counts them.

    Args:
        limit: at most this many.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"at least one episode must be allowed at a time, got {limit}")
        self.limit, self.in_flight, self.max_in_flight = limit, 0, 0
        self._free = asyncio.Semaphore(limit)

    @property
    def capacity(self) -> int:
        """How many more could start now."""
        return self.limit - self.in_flight

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a place and holds it."""
        async with self._free:
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            try:
                yield
            finally:
                self.in_flight -= 1


@dataclass(frozen=True)
class Collector:
    """What a collection needs besides tasks.

    Args:
        agent: plays the episodes.
        environment: has prompts, first states and rewards.
        make_context: makes each episode's ToolContext.
        gate: bounds how many episodes run at once.
        reward_timeout_s: deadline of `compute_reward`.
        server: runs the environment's `reward_functions`, and its `compute_reward` if that is not `async`.
    """

    agent: Agent
    environment: Environment
    make_context: MakeContext
    gate: Gate
    reward_timeout_s: float = math.inf
    server: WorkerServer | None = None


async def collect_groups(
    collector: Collector, items: Sequence[Item], *, group_size: int, seed: int, step: int, first_place: int = 0
) -> list[Group]:
    """Plays `group_size` episodes of each item; groups come in the order of the items.

    Every seed is folded from (seed, step, task id, place of the task, member), so a repeated collection samples the
    same and no two episodes of a step share one. Nothing is tried again; an episode that fails is there with its
    outcome and error.

    Args:
        seed: of the run.
        step: number of this collection.
        first_place: place of the first item, when the step has collected others before.

    Raises:
        WorkerServerDied: the collector's server has ended; the other episodes, which could only fail, were cancelled.
    """
    work = _all(
        collect_group(collector, item, group_size=group_size, seed=fold_seed(seed, step, place))
        for place, item in enumerate(items, first_place)
    )
    return await (work if collector.server is None else collector.server.guard(work))


async def collect_group(collector: Collector, item: Item, *, group_size: int, seed: int) -> Group:
    """Plays one task `group_size` times. Never raises for what one member does; see `collect_groups`."""
    environment = collector.environment
    task_id = environment.task_id(item)
    try:
        messages = environment.messages(item)
    except Exception as error:
        failed = [_failed(task_id, member, error) for member in range(group_size)]
        return Group(task_id, tuple(failed), item)
    episodes = await _all(
        _member(collector, item, messages, task_id, member, fold_seed(seed, task_id, member))
        for member in range(group_size)
    )
    if environment.reward_functions:
        episodes = await _score_valid(collector, item, episodes)
    return Group(task_id, tuple(episodes), item)


async def _member(
    collector: Collector, item: Item, messages: Sequence[Message], task_id: str, member: int, seed: int
) -> Episode:
    """One episode from its context's making to its end; its failure stays its own."""
    agent, environment = collector.agent, collector.environment

    async def prepare(own_messages: list[dict[str, Any]]) -> Sequence[Message] | None:
        changed: Sequence[Message] | None = await call(environment.prepare, item, own_messages, ctx)
        return changed

    async with collector.gate.place():
        try:
            ctx = collector.make_context(task_id, member)
            try:
                episode = await run_episode(
                    agent,
                    messages,
                    ctx,
                    task_id=task_id,
                    member=member,
                    seed=seed,
                    session=f"{task_id}/{member}/{seed:x}",  # a task may stand in a collection twice
                    prepare=prepare if environment.prepares else None,
                )
                if episode.outcome in WITHOUT_TRAJECTORIES or environment.reward_functions:
                    return episode
                return await score_episode(
                    environment,
                    item,
                    episode,
                    ctx,
                    timeout_s=collector.reward_timeout_s,
                    clock=agent.clock,
                    server=collector.server,
                )
            finally:
                await _clean_up(ctx)
        except Exception as error:
            return _failed(task_id, member, error)


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. Unlike `asyncio.gather`, a cancellation waits for the clean-up of all that was begun."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        if tasks:
            await asyncio.wait(tasks)
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
    return [task.result() for task in tasks]


async def _score_valid(collector: Collector, item: Item, episodes: list[Episode]) -> list[Episode]:
    """Rewards by the environment's functions for all members that have something to reward."""
    if collector.server is None:
        raise ValueError("the environment has reward_functions, which need a WorkerServer: pass Collector(server=...)")
    places = [at for at, episode in enumerate(episodes) if episode.outcome not in WITHOUT_TRAJECTORIES]
    valid = [episodes[at] for at in places]
    scored = await score_group(collector.environment, item, valid, collector.server)
    for at, episode in zip(places, scored, strict=True):
        episodes[at] = episode
    return episodes


async def _clean_up(ctx: Any) -> None:
    """Ends the episode's sandbox, also when this task is being cancelled."""
    if ctx is not None:
        await asyncio.shield(asyncio.ensure_future(ctx.cleanup()))


def _failed(task_id: str, member: int, error: Exception) -> Episode:
    return Episode(
        task_id=task_id,
        member=member,
        trajectories=(),
        outcome=Outcome.ENV_ERROR,
        error=f"task {task_id}, member {member}: {type(error).__name__}: {error}",
        counters={Outcome.ENV_ERROR.value: 1},
    )
