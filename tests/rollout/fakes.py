"""A clock that jumps, an engine that follows a script, tools that do too. Everything else in these tests is real."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_jax.clock import Clock
from hermes_jax.engines.base import Completion, EngineError, Sampling

_IDLE_ROUNDS = 25


class FakeClock:
    """Time that stands still while anything can run, and jumps to the next sleeper when nothing can."""

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._ticking = False

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + seconds, next(self._numbers), future))
        if not self._ticking:
            self._ticking = True
            self._tick(_IDLE_ROUNDS)
        await future

    def _tick(self, rounds: int) -> None:
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        self._ticking = bool(self._sleepers)
        if not self._sleepers:
            return
        if rounds:
            asyncio.get_running_loop().call_soon(self._tick, rounds - 1)
            return
        self.time, _, future = heapq.heappop(self._sleepers)
        future.set_result(None)
        asyncio.get_running_loop().call_soon(self._tick, _IDLE_ROUNDS)


@dataclass(frozen=True)
class Reply:
    """What the scripted engine answers."""

    token_ids: Sequence[int]
    finish_reason: str = "stop"
    version: int = 0
    logprobs: Sequence[float] | None = None
    takes_s: float = 0.0
    error: Exception | None = None


@dataclass
class Request:
    """What the scripted engine was asked."""

    prompt: tuple[int, ...]
    sampling: Sampling
    session: Hashable
    request_id: str


@dataclass
class ScriptedEngine:
    """A `TokenEngine` that gives each session the same replies in order; the k-th token has log-prob -(k + 1) / 8.

    `script` may be a function of the session instead.
    """

    script: Sequence[Reply] | Callable[[Any], Sequence[Reply]]
    clock: Clock | None = None
    requests: list[Request] = field(default_factory=list)
    released: list[Hashable] = field(default_factory=list)
    in_flight: int = 0
    _places: dict[Any, int] = field(default_factory=lambda: defaultdict(int))
    _sampled: dict[Any, int] = field(default_factory=lambda: defaultdict(int))

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, *, session: Hashable | None = None, request_id: str = ""
    ) -> Completion:
        self.requests.append(Request(prompt_ids, sampling, session, request_id))
        script = self.script(session) if callable(self.script) else self.script
        place = self._places[session]
        self._places[session] += 1
        if place >= len(script):
            raise EngineError(f"request {request_id}: the script has {len(script)} replies only")
        self.in_flight += 1
        try:
            return await self._answer(script[place], session)
        finally:
            self.in_flight -= 1

    async def _answer(self, reply: Reply, session: Hashable) -> Completion:
        if reply.takes_s and self.clock:
            await self.clock.sleep(reply.takes_s)
        if reply.error:
            raise reply.error
        first = self._sampled[session]
        self._sampled[session] += len(reply.token_ids)
        logprobs = reply.logprobs
        if logprobs is None:
            logprobs = [-(k + 1) / 8 for k in range(first, first + len(reply.token_ids))]
        return Completion(
            tuple(reply.token_ids), tuple(logprobs), reply.finish_reason, (reply.version,) * len(reply.token_ids)
        )

    async def release(self, session: Hashable) -> None:
        self.released.append(session)

    async def publish(self, params: Any, version: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass


@dataclass
class ScriptedTool:
    """Answers by arguments; several answers to the same arguments come one after the other."""

    name: str
    answers: Sequence[tuple[Mapping[str, Any], list[str]]]
    clock: Clock
    takes_s: float = 0.0
    runs: list[str] = field(default_factory=list)

    async def call(self, arguments: dict[str, Any], ctx: Any) -> str:
        self.runs.append(self.name)
        if self.takes_s:
            await self.clock.sleep(self.takes_s)
        for expected, returns in self.answers:
            if expected == arguments:
                return returns.pop(0) if len(returns) > 1 else returns[0]
        raise LookupError(f"no answer to {arguments}")
