"""The slot table: who gets a slot, what is kept, what is copied; simulated against a cache that is a list of ids."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_jax.engines.base import Sampling
from hermes_jax.engines.rows import padded_chunks
from hermes_jax.engines.slots import NO_IDS, Request, SlotTable, common_prefix

GARBAGE = -7


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Simulation:
    """Plays the device: a cache of ids, in which decode leaves garbage as far as prefill is concerned."""

    def __init__(self, slots, chunk, loop, width=64):
        self.table, self.loop, self.width = SlotTable(slots, chunk), loop, width
        self.cache = np.full((slots, width), GARBAGE, np.int64)
        self.prefilled = self.copied = 0
        self.finished: list[str] = []

    def ask(self, prompt, session=None, name=""):
        request = Request(
            name, np.asarray(prompt, np.int32), Sampling(max_tokens=1), 1, self.loop.create_future(), session
        )
        self.table.waiting.append(request)
        return request

    def advance(self, *, finish=True, rows=4):
        """One turn of the engine; True if there was something to do."""
        table = self.table
        table.drop_dead()
        table.admit()
        copies, chunks = table.take_copies(), table.take_chunks(rows)
        if copies:
            before = self.cache.copy()
            for source, destination in copies:
                self.cache[destination] = before[source]
            self.copied += len(copies)
        assert len({c.slot for c in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.start % table.chunk == 0
            assert 0 < len(chunk.ids) <= table.chunk
            self.cache[chunk.slot, chunk.start : chunk.start + len(chunk.ids)] = chunk.ids
            self.prefilled += len(chunk.ids)
        if copies or chunks:
            return True
        ready = [slot for slot in table.slots if slot.ready]
        for slot in ready:
            self.decode(slot, finish)
        return bool(ready)

    def decode(self, slot, finish):
        prompt = slot.request.prompt
        assert self.cache[slot.index, : len(prompt) - 1].tolist() == prompt[:-1].tolist()
        self.cache[slot.index, len(prompt) - 1 : len(prompt) + 1] = GARBAGE
        if finish:
            self.finished.append(slot.request.request_id)
            slot.request.reply.cancel()
            self.table.free(slot)

    def run(self, **options):
        for _ in range(10_000):
            if not self.advance(**options):
                return self
        raise AssertionError("the table never comes to rest")


def test_common_prefix():
    a = np.array([1, 2, 3], np.int32)
    assert common_prefix(a, a) == 3
    assert common_prefix(a, a[:2]) == 2
    assert common_prefix(a, np.array([1, 9, 3, 4], np.int32)) == 1
    assert common_prefix(a, NO_IDS) == 0


def test_a_group_is_prefilled_once_and_copied(loop):
    sim = Simulation(8, 8, loop)
    for member in range(8):
        sim.ask(range(30), session=member)
    sim.run()
    assert sim.prefilled == 29
    assert sim.copied == 7
    assert len(sim.finished) == 8


def test_a_common_prefix_is_shared_up_to_a_chunk(loop):
    sim = Simulation(4, 8, loop)
    sim.ask([*range(20), 50, 51, 52])
    sim.ask([*range(20), 60, 61, 62])
    sim.run()
    assert sim.copied == 1
    assert sim.prefilled == 22 + (22 - 16)


def test_a_session_goes_on_in_its_slot_from_the_chunk_that_decode_wrote(loop):
    sim = Simulation(4, 8, loop)
    sim.ask(range(20), session="a")
    sim.run()
    sim.prefilled = 0
    sim.ask(range(30), session="a")
    sim.run()
    assert sim.prefilled == 29 - 16  # 19 ids were prefilled: chunks 0 and 1 are complete
    assert [slot.session for slot in sim.table.slots].count("a") == 1


def test_a_prompt_that_is_all_kept_needs_no_prefill(loop):
    sim = Simulation(4, 8, loop)
    sim.ask(range(20), session="a")
    sim.run()
    sim.prefilled = 0
    sim.ask(range(20), session="a")
    sim.ask([5])
    sim.run()
    assert sim.prefilled == 0
    assert len(sim.finished) == 3


def test_a_free_slot_is_taken_before_a_session_loses_its_own_and_then_the_oldest_goes(loop):
    sim = Simulation(4, 8, loop)
    for session in "abc":
        sim.ask([ord(session)] * 10, session=session)
        sim.run()
    sim.ask([1] * 10, session="d")
    sim.run()
    assert {slot.session for slot in sim.table.slots} == set("abcd")
    sim.ask([2] * 10, session="e")
    sim.run()
    assert {slot.session for slot in sim.table.slots} == set("bcde")


def test_eviction_spares_a_session_whose_next_turn_already_waits(loop):
    sim = Simulation(4, 8, loop)
    for session in "abcd":
        sim.ask([ord(session)] * 10, session=session)
        sim.run()
    sim.ask([1] * 10, session="e")
    sim.ask([ord("a")] * 12, session="a")
    sim.run()
    assert {slot.session for slot in sim.table.slots} == set("acde")


def test_release_gives_the_slot_away_first(loop):
    sim = Simulation(4, 8, loop)
    for session in "abcd":
        sim.ask([ord(session)] * 10, session=session)
        sim.run()
    sim.table.release("d")
    sim.table.release("nobody")
    sim.ask([1] * 10, session="e")
    sim.run()
    assert {slot.session for slot in sim.table.slots} == set("abce")


def test_requests_are_served_in_order(loop):
    sim = Simulation(4, 8, loop)
    for i in range(13):
        sim.ask([i] * 3, name=str(i))
    sim.run()
    assert sim.finished == [str(i) for i in range(13)]


def test_a_follower_goes_on_alone_when_its_leader_is_cancelled(loop):
    sim = Simulation(4, 8, loop)
    leader = sim.ask(range(40), name="leader")
    sim.ask(range(40), name="follower")
    sim.advance()
    leader.reply.cancel()
    sim.run()
    assert sim.finished == ["follower"]


def test_forgetting_prefills_everything_again(loop):
    sim = Simulation(4, 8, loop)
    sim.ask(range(20), session="a")
    sim.run()
    sim.cache[:] = GARBAGE
    sim.table.forget()
    sim.ask(range(20), session="a")
    sim.run()
    assert sim.prefilled == 2 * 19


def test_padding_sits_beyond_the_cache():
    table = SlotTable(4, 4)
    ids, positions, slots = padded_chunks([], rows=4, chunk=table.chunk, width=32)
    assert (positions == 32).all()
    assert ids.shape == positions.shape == (4, 4)
    assert slots.shape == (4,)


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 5),  # which family of prompts
        st.integers(1, 40),  # its length
        st.sampled_from([None, "a", "b", "c", "d", "e", "f"]),
        st.integers(0, 3),  # turns of the engine before the next event
        st.sampled_from(["", "", "", "cancel", "release", "forget"]),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, slots=st.integers(1, 6), chunk=st.sampled_from([1, 4, 8]))
def test_any_history_ends_and_decode_always_finds_its_prompt(events, slots, chunk, loop):
    """`Simulation.decode` asserts that the cache holds the prompt; `run` that all of it comes to rest."""
    sim = Simulation(slots, chunk, loop)
    requests = []
    for family, length, session, turns, what in events:
        prompt = [*range(min(length, 13)), *(100 * family + i for i in range(length - 13))]
        requests.append(sim.ask(prompt, session=session, name=str(len(requests))))
        for _ in range(turns):
            sim.advance(finish=length % 2 == 0, rows=2)
        if what == "cancel":
            requests[length % len(requests)].reply.cancel()
        elif what == "release":
            sim.table.release(session)
        elif what == "forget" and not sim.table.active:
            sim.cache[:] = GARBAGE
            sim.table.forget()
    sim.run()
    assert not sim.table.active
    assert not sim.table.waiting
    assert all(request.is_dead for request in requests)
