"""Who sits in which KV-cache slot: admission, eviction, shared prompts. Plain Python over numpy, no jax.

Rules that make a reply independent of its company:

* The cache of a slot is trusted only where *prefill* wrote it. Prefill runs in chunks that start at multiples of
  `chunk`, so the K/V of a position depends on nothing but the ids up to it. What decode wrote is written again by
  prefill when the next turn's prompt contains it.
* The last id of a prompt is not prefilled: decode takes it as its first input, so every sampled token comes from the
  same computation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hermes_jax.engines.base import Completion, Sampling

Ids = Int[np.ndarray, " token"]
NO_IDS: Ids = np.zeros(0, np.int32)


@dataclass(eq=False)
class Request:
    """One reply in the making.

    Args:
        prompt: ids, at least one.
        limit: at most this many new tokens (`max_tokens`, or less where the context ends).
        reply: whom the caller awaits.
        token_ids, logprobs: what has been sampled so far.
    """

    request_id: str
    prompt: Ids
    sampling: Sampling
    limit: int
    reply: asyncio.Future[Completion]
    session: Hashable | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_dead(self) -> bool:
        """True once nobody waits for the reply any more: it was cancelled or has failed."""
        return self.reply.done()


@dataclass(eq=False)
class Slot:
    """One row of the cache.

    Args:
        ids: what prefill has written or will write.
        done: how many of `ids` are written.
        session: whose turn used the slot last; kept between turns.
        request: the reply being made, None = idle.
        leader, shared: `shared` ids will be copied from `leader` once it has them.
        last_used: turn of the table's own counter, for eviction.
    """

    index: int
    ids: Ids = field(default_factory=lambda: NO_IDS)
    done: int = 0
    session: Hashable | None = None
    request: Request | None = None
    leader: Slot | None = None
    shared: int = 0
    last_used: int = 0

    @property
    def ready(self) -> bool:
        """True if decode may run."""
        return self.request is not None and self.leader is None and self.done == len(self.ids)


class ChunkRow(NamedTuple):
    """Ids to prefill in one slot: at most a chunk of them, `start` is a multiple of the chunk."""

    slot: int
    start: int
    ids: Ids


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of ids that both begin with."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


class SlotTable:
    """All slots and the queue before them.

    Requests are admitted first come, first served; an idle slot is always up for grabs (sessions only prefer their
    own), so fewer slots than episodes never starve anyone.

    Args:
        slots: number of cache rows.
        chunk: ids per prefill chunk.
    """

    def __init__(self, slots: int, chunk: int) -> None:
        self.slots = [Slot(i) for i in range(slots)]
        self.chunk = chunk
        self.waiting: deque[Request] = deque()
        self._turn = 0

    @property
    def active(self) -> list[Slot]:
        """Slots with a reply in the making."""
        return [slot for slot in self.slots if slot.request is not None]

    def admit(self) -> None:
        """Gives slots to waiting requests, in order, as long as there are idle ones."""
        while self.waiting:
            request = self.waiting[0]
            slot = None if request.is_dead else self._choose(request)
            if slot is None and not request.is_dead:
                return
            self.waiting.popleft()
            if slot is not None:
                self._seat(request, slot)

    def drop_dead(self) -> None:
        """Frees the slots of replies that nobody waits for any more."""
        for slot in self.active:
            if slot.request is not None and slot.request.is_dead:
                self.free(slot)

    def free(self, slot: Slot) -> None:
        """Ends the reply in a slot; the slot stays with its session and what prefill wrote stays of use."""
        slot.request, slot.leader = None, None
        slot.last_used = self._next_turn()

    def release(self, session: Hashable) -> None:
        """The session needs no slot any more."""
        for slot in self.slots:
            if slot.session == session:
                slot.session = None

    def forget(self) -> None:
        """Trusts nothing in any cache any more: the weights changed or the device failed."""
        for slot in self.slots:
            slot.ids, slot.done = NO_IDS, 0

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) of the prefixes that can be copied now; the caller copies them before it prefills."""
        # Looked up before any slot is changed: a slot that only now receives ids can't hand them on in the same call.
        followers = [(s, s.leader, s.leader.done >= s.shared) for s in self.slots if s.leader is not None]
        copies = []
        for slot, leader, has_ids in followers:
            if has_ids:
                copies.append((leader.index, slot.index))
                slot.done, slot.leader = slot.shared, None
            elif leader.request is None:  # its reply was cancelled: go on alone
                slot.leader = None
        return copies

    def take_chunks(self, rows: int) -> list[ChunkRow]:
        """The next chunks to prefill, at most `rows`, one per slot; the caller must run them before anything else."""
        waiting = [s for s in self.slots if s.request is not None and s.leader is None and s.done < len(s.ids)]
        chunks = []
        for slot in sorted(waiting, key=lambda s: s.last_used)[:rows]:
            end = min(slot.done + self.chunk, len(slot.ids))
            chunks.append(ChunkRow(slot.index, slot.done, slot.ids[slot.done : end]))
            slot.done = end
        return chunks

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _choose(self, request: Request) -> Slot | None:
        """The session's own slot, else the one that nobody will miss soonest; a slot being copied from is not given."""
        sources = {id(slot.leader) for slot in self.slots}
        idle = [slot for slot in self.slots if slot.request is None and id(slot) not in sources]
        if not idle:
            return None
        if request.session is not None:
            own = [slot for slot in idle if slot.session == request.session]
            if own:
                return own[0]
        expected = {other.session for other in self.waiting} - {None}
        return min(idle, key=lambda s: (s.session is not None, s.session in expected, s.last_used))

    def _seat(self, request: Request, slot: Slot) -> None:
        target = request.prompt[:-1]
        kept = self._usable(common_prefix(slot.ids[: slot.done], target), target)
        leader, shared = self._best_source(slot, target)
        if request.session is not None:
            self.release(request.session)
        slot.session, slot.request = request.session, request
        slot.ids, slot.done, slot.last_used = target, kept, self._next_turn()
        slot.leader, slot.shared = (leader, shared) if shared > kept else (None, 0)

    def _best_source(self, slot: Slot, target: Ids) -> tuple[Slot | None, int]:
        best: tuple[Slot | None, int] = (None, 0)
        for other in self.slots:
            if other is slot:
                continue
            promised = other.ids if other.request is not None else other.ids[: other.done]
            shared = self._usable(common_prefix(promised, target), target)
            if shared > best[1]:
                best = (other, shared)
        return best

    def _usable(self, shared: int, target: Ids) -> int:
        """Prefill goes on at the start of a chunk, unless nothing is left to do."""
        return shared if shared == len(target) else shared - shared % self.chunk
