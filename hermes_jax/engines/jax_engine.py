"""The embedded engine: continuous batching over KV-cache slots, in the process of the learner.

    with DeviceThread() as device:
        engine = JaxEngine(params, config, slots=64, width=1024, banned=None, device_thread=device)
        reply = await engine.generate(prompt_ids, Sampling(max_tokens=200, seed=7), session="episode 3")

A reply is a bitwise function of (weights, prompt ids, sampling, seed) for an engine of given shapes: alone or in
company, in a fresh, reused, kept or evicted slot.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool

from hermes_jax.clock import Clock, RealClock
from hermes_jax.engines.base import Completion, EngineError, Sampling
from hermes_jax.engines.device import DeviceThread, Submitted
from hermes_jax.engines.metrics import EngineMetrics
from hermes_jax.engines.requests import check_prompt, check_sampling, truncates
from hermes_jax.engines.rows import Decoded, Shapes, decode_rows
from hermes_jax.engines.runner import ModelRunner
from hermes_jax.engines.slots import ChunkRow, Request, Slot, SlotTable
from hermes_jax.models.config import ModelConfig

logger = logging.getLogger(__name__)

DELIVERED_AT_ONCE = 4
"""Complete replies handed over in one turn of the event loop; each wakes an episode, which has some work to do."""


@dataclass
class _Publication:
    """Weights that wait for the replies in flight to end."""

    params: Any
    version: int
    done: asyncio.Future[None]


class JaxEngine:
    """A `TokenEngine` on the devices of this process.

    While there is work, one task of the event loop plans the next device call (on numpy) and awaits it on the device
    thread: copies and prefill chunks first, so that decode steps, which always run all slots, are well filled.

    Args:
        params: weights as the learner holds them (layers stacked); copied.
        model_config: of the weights.
        slots: replies made at the same time, at least 4; more requests wait their turn.
        width: context length in tokens, prompt and reply together.
        banned: ids that are never sampled (padding of the vocabulary, say), one flag per id.
        device_thread: shared with the learner; not closed by the engine.
        chunk, prefill_rows: shape of a prefill call, in ids per row and rows.
        decode_steps: tokens per row and decode call; more = less host work, but replies join and leave later.
        max_stop_ids: stop ids per request, at most.
        dtype: of the engine's weights, products and cache; logits and sampling are fp32.
        allow_truncation: lets requests use top-p, top-k, min-p. For evaluation; may be changed at any time.
        version: of `params`.

    Raises:
        ValueError: shapes that the engine can't work with.
    """

    def __init__(
        self,
        params: Any,
        model_config: ModelConfig,
        *,
        slots: int,
        width: int,
        device_thread: DeviceThread,
        banned: Bool[np.ndarray, " vocab"] | None = None,
        chunk: int = 32,
        prefill_rows: int = 8,
        decode_steps: int = 8,
        max_stop_ids: int = 8,
        dtype: DTypeLike = np.float32,
        allow_truncation: bool = False,
        version: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.allow_truncation = allow_truncation
        self.shapes = Shapes(slots, width, chunk, prefill_rows, decode_steps, max_stop_ids)
        self._vocab = model_config.vocab_size
        banned = _checked_banned(banned, model_config, width)
        self._clock = clock or RealClock()
        self._device = device_thread
        self._table = SlotTable(slots, chunk)
        self._metrics = EngineMetrics()
        self._version = version
        self._publications: list[_Publication] = []
        self._complete: deque[tuple[asyncio.Future[Completion], Completion]] = deque()
        self._driver: asyncio.Task[None] | None = None
        self._closed = self._damaged = False

        def build() -> ModelRunner:
            runner = ModelRunner(model_config, self.shapes, banned, dtype)
            runner.publish(params, version)
            return runner

        self._runner: Submitted[ModelRunner] | None = device_thread.submit(build)

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, *, session: Hashable | None = None, request_id: str = ""
    ) -> Completion:
        """Samples one reply; see `TokenEngine`. Cancelling it frees its slot.

        A reply ends with "length" at `max_tokens` or where the context is full. A greedy reply's log-probs are those
        of temperature 1.

        Raises:
            EngineError: a request that can't be answered, or a closed or failed engine.
        """
        self._check_open(request_id)
        width = self.shapes.width
        prompt = check_prompt(prompt_ids, request_id=request_id, width=width, vocab=self._vocab)
        check_sampling(
            sampling,
            request_id=request_id,
            stop_ids=self.shapes.stop_ids,
            allow_truncation=self.allow_truncation,
        )
        limit = min(sampling.max_tokens, width - len(prompt))
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._table.waiting.append(Request(request_id, prompt, sampling, limit, reply, session))
        self._metrics.prompt_tokens += len(prompt)
        self._wake()
        return await reply

    async def release(self, session: Hashable) -> None:
        """The episode is over: its slot goes to whoever comes next. Unknown sessions are no error."""
        self._table.release(session)

    async def publish(self, params: Any, version: int) -> None:
        """Replaces the weights by copies of `params`; kept slots and cached prompts count for nothing afterwards.

        Replies that have a slot end under the old weights first; those that wait get the new ones. Returns when the
        copies are made: until then the caller must not donate `params`.

        Raises:
            EngineError: the engine is closed, or the weights don't fit on the device or into the model.
            ValueError: `version` is not above all earlier ones.
        """
        self._check_open("publish")
        newest = self._publications[-1].version if self._publications else self._version
        if version <= newest:
            raise ValueError(
                f"weights {version} can't follow weights {newest}: a version says which weights sampled a token, so "
                f"each publication needs a higher one; publish them as {newest + 1} or later"
            )
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._publications.append(_Publication(params, version, done))
        self._wake()
        await done

    async def close(self) -> None:
        """Ends the engine and fails every request in flight; frees its arrays."""
        self._closed = True
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        self._fail_all(EngineError("the engine was closed"))
        self._runner = None  # lets go of the arrays

    def metrics(self) -> EngineMetrics:
        """The counters as they are now."""
        return replace(self._metrics)

    def _check_open(self, request_id: str) -> None:
        if self._closed:
            raise EngineError(f"request {request_id!r}: the engine is closed")

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Works until there is nothing to do; a failure ends all that is in flight, never the engine."""
        started = self._clock.now()
        try:
            assert self._runner is not None  # only a closed engine has none, and that has no driver
            runner = await self._runner
            if self._damaged:
                await self._device.submit(runner.reset)
                self._damaged = False
            while await self._advance(runner):
                pass
            self._metrics.compilations = runner.compilations.count
        except asyncio.CancelledError:
            self._fail_all(EngineError(f"the {'engine was closed' if self._closed else 'event loop ended'} mid-reply"))
            raise
        except Exception as error:
            logger.exception("the embedded engine failed; everything in flight ends")
            self._damaged = True  # it may have used up the cache that was donated to it
            self._fail_all(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
        finally:
            self._metrics.busy_s += self._clock.now() - started

    async def _advance(self, runner: ModelRunner) -> bool:
        """One device call, whichever is due; False if there was nothing to do."""
        table = self._table
        table.drop_dead()
        if not self._publications:
            table.admit()
        copies, chunks = table.take_copies(), table.take_chunks(self.shapes.prefill_rows)
        if copies or chunks:
            await self._prefill(runner, copies, chunks)
        elif ready := [slot for slot in table.slots if slot.ready]:
            await self._decode(runner, ready)
        elif self._publications:
            await self._swap(runner, self._publications[0])
        else:
            return False
        return True

    async def _prefill(self, runner: ModelRunner, copies: list[tuple[int, int]], chunks: list[ChunkRow]) -> None:
        started = self._clock.now()
        await self._device.submit(runner.prefill, copies, chunks)
        self._metrics.copied_slots += len(copies)
        if chunks:
            self._metrics.prefill_calls += 1
            self._metrics.prefill_tokens += sum(len(chunk.ids) for chunk in chunks)
            self._metrics.prefill_tokens_padded += self.shapes.prefill_rows * self.shapes.chunk
        self._metrics.prefill_s += self._clock.now() - started

    async def _decode(self, runner: ModelRunner, ready: list[Slot]) -> None:
        started = self._clock.now()
        truncate = any(slot.request is not None and truncates(slot.request.sampling) for slot in ready)
        out = await self._device.submit(runner.decode, decode_rows(ready, self.shapes), truncate)
        self._metrics.decode_calls += 1
        self._metrics.decode_steps += int(out.steps)
        self._metrics.tokens_generated += int(out.count.sum())
        for slot in ready:
            self._collect(slot, out, runner.version)
        self._metrics.decode_s += self._clock.now() - started

    def _collect(self, slot: Slot, out: Decoded, version: int) -> None:
        """Adds what a decode call sampled to a slot's reply, and hands the reply over if it is complete."""
        request, row = slot.request, slot.index
        assert request is not None
        count = int(out.count[row])
        request.token_ids += out.token_ids[row, :count].tolist()
        request.logprobs += out.logprobs[row, :count].tolist()
        stopped = bool(out.stopped[row])
        if not np.isfinite(out.logprobs[row, :count]).all():
            _fail(
                request.reply,
                EngineError(
                    f"request {request.request_id!r}: the model gave logits that are not finite under weights "
                    f"{version}; do the weights hold NaN or infinity?"
                ),
            )
        elif stopped or len(request.token_ids) >= request.limit:
            completion = Completion(
                token_ids=tuple(request.token_ids),
                logprobs=tuple(request.logprobs),
                finish_reason="stop" if stopped else "length",
                versions=(version,) * len(request.token_ids),
            )
            self._hand_over(request.reply, completion)
            self._table.free(slot)
            return
        if request.is_dead:
            self._table.free(slot)

    def _hand_over(self, reply: asyncio.Future[Completion], completion: Completion) -> None:
        """Queues a complete reply: all of a call at once would keep the event loop from anything else for long."""
        if not self._complete:
            asyncio.get_running_loop().call_soon(self._deliver, DELIVERED_AT_ONCE)
        self._complete.append((reply, completion))

    def _deliver(self, most: int) -> None:
        """Gives the next complete replies to those who wait, and lets the loop do other things before the rest."""
        for reply, completion in [self._complete.popleft() for _ in range(min(most, len(self._complete)))]:
            if not reply.done():  # else it was cancelled
                reply.set_result(completion)
        if self._complete:
            asyncio.get_running_loop().call_soon(self._deliver, DELIVERED_AT_ONCE)

    async def _swap(self, runner: ModelRunner, publication: _Publication) -> None:
        if not publication.done.done():  # else whoever published gave up
            self._table.forget()
            try:
                await self._device.submit(runner.publish, publication.params, publication.version)
                self._version = publication.version
            except Exception as error:
                _fail(publication.done, EngineError(f"weights {publication.version} could not be published: {error}"))
            if not publication.done.done():
                publication.done.set_result(None)
        self._publications.pop(0)

    def _fail_all(self, error: EngineError) -> None:
        """Fails everything in flight and trusts no cache: a call may have ended halfway. Complete replies stand."""
        self._deliver(len(self._complete))
        for slot in self._table.active:
            if slot.request is not None:
                _fail(slot.request.reply, error)
            self._table.free(slot)
        for request in self._table.waiting:
            _fail(request.reply, error)
        for publication in self._publications:
            _fail(publication.done, error)
        self._table.waiting.clear()
        self._publications.clear()
        self._table.forget()


def _checked_banned(
    banned: Bool[np.ndarray, " vocab"] | None, config: ModelConfig, width: int
) -> Bool[np.ndarray, " vocab"]:
    if width > config.max_length:
        raise ValueError(f"width={width} exceeds the model's context of {config.max_length} tokens")
    banned = np.zeros(config.vocab_size, bool) if banned is None else np.array(banned, bool)
    if banned.shape != (config.vocab_size,) or banned.all():
        raise ValueError(
            f"banned needs one flag for each of {config.vocab_size} ids and must leave one: {banned.shape}"
        )
    return banned


def _fail(future: asyncio.Future[Any], error: EngineError) -> None:
    if not future.done():
        future.set_exception(error)
