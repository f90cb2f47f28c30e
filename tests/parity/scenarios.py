"""What the engine and the learner must agree on: each function plays one situation and returns the conversations."""

from __future__ import annotations

import asyncio

import jax

from hermes_jax.models.transformer import Params
from tests.engines.tiny import fill_cache
from tests.parity.harness import Bench, Conversation


def talks(bench: Bench, count: int, length: int, *, name: str = "", same: bool = False) -> list[Conversation]:
    """Conversations about different prompts (or all about the same)."""
    return [
        Conversation(
            bench.engine,
            list(bench.prompt(0 if same else i, length)),
            session=(name, i) if name else None,
            temperature=bench.temperature,
        )
        for i in range(count)
    ]


async def first_last_and_stop_token(bench: Bench) -> list[Conversation]:
    """Replies that end with a stop id, in the middle and as the last allowed token, and one that ends by length."""
    free = talks(bench, 3, 13)
    replies = await asyncio.gather(*(talk.turn(seed=i) for i, talk in enumerate(free)))
    stopped = talks(bench, 3, 13)
    for i, (talk, reply) in enumerate(zip(stopped, replies, strict=True)):
        stop = reply.token_ids[4]
        last = reply.token_ids.index(stop) + 1
        again = await talk.turn(seed=i, stop_ids=(stop,), max_tokens=9 if i else last)
        assert again.finish_reason == "stop"
        assert again.token_ids[-1] == stop
    assert all(reply.finish_reason == "length" for reply in replies)
    return free + stopped


async def second_turn_after_a_tool_result(bench: Bench) -> list[Conversation]:
    """The prompt of turn 2 holds the sampled reply and ids that were not sampled."""
    conversations = talks(bench, 4, 11, name="two turns")

    async def play(number: int, talk: Conversation) -> None:
        for turn in range(3):
            await talk.turn(seed=10 * number + turn)
            talk.tokens += bench.prompt(50 + number + turn, 4 + turn)

    await asyncio.gather(*(play(i, talk) for i, talk in enumerate(conversations)))
    assert any(slot.session == ("two turns", 0) for slot in bench.engine._table.slots)
    return conversations


async def shared_group_prompt(bench: Bench) -> list[Conversation]:
    """One prompt, several members: prefilled once and copied."""
    conversations = talks(bench, 4, 2 * bench.engine.shapes.chunk + 3, same=True)
    before = bench.engine.metrics()
    await asyncio.gather(*(talk.turn(seed=i) for i, talk in enumerate(conversations)))
    after = bench.engine.metrics()
    assert after.copied_slots - before.copied_slots == 3
    assert after.prefill_tokens - before.prefill_tokens == 2 * bench.engine.shapes.chunk + 2
    return conversations


async def slot_reused_after_a_longer_tenant(bench: Bench) -> list[Conversation]:
    """Every slot held a long conversation; then its cache is full of 1e9."""
    shapes = bench.engine.shapes
    tenants = talks(bench, shapes.slots, shapes.width - 8)
    await asyncio.gather(*(talk.turn(seed=i, max_tokens=8) for i, talk in enumerate(tenants)))
    later = talks(bench, shapes.slots, 10)
    await asyncio.gather(*(talk.turn(seed=i) for i, talk in enumerate(later)))
    fill_cache(bench.engine, 1e9)
    last = talks(bench, shapes.slots, 12)
    await asyncio.gather(*(talk.turn(seed=i) for i, talk in enumerate(last)))
    return later + last


async def evicted_and_prefilled_again(bench: Bench) -> list[Conversation]:
    """Twice as many conversations as slots: between its turns each loses its slot."""
    slots = bench.engine.shapes.slots
    conversations = talks(bench, 2 * slots, 12, name="evicted")
    for turn in range(2):
        for wave in (conversations[:slots], conversations[slots:]):
            seated = {slot.session for slot in bench.engine._table.slots}
            assert seated.isdisjoint({talk.session for talk in wave})
            await asyncio.gather(*(talk.turn(seed=turn, max_tokens=5) for talk in wave))
            for talk in wave:
                talk.tokens += bench.prompt(70 + turn, 3)
    return conversations


async def both_sides_of_a_chunk_edge(bench: Bench) -> list[Conversation]:
    """Prompts that end before, at and after the end of a prefill chunk; replies that cross one."""
    chunk = bench.engine.shapes.chunk
    lengths = [chunk - 2, chunk - 1, chunk, chunk + 1, chunk + 2, 2 * chunk, 2 * chunk + 1]
    conversations = [talk for i, length in enumerate(lengths) for talk in talks(bench, i + 1, length)[i:]]
    await asyncio.gather(*(talk.turn(seed=i) for i, talk in enumerate(conversations)))
    return conversations


async def after_a_publication_with_kept_slots(bench: Bench) -> list[Conversation]:
    """Turn 1 under one version, turn 2 of the same session under the next one, with other weights."""
    conversations = talks(bench, 3, 2 * bench.engine.shapes.chunk + 3, name="published")
    await asyncio.gather(*(talk.turn(seed=i) for i, talk in enumerate(conversations)))
    await bench.publish(1)
    for talk in conversations:
        talk.tokens += bench.prompt(90, 2)
    await asyncio.gather(*(talk.turn(seed=i) for i, talk in enumerate(conversations)))
    assert [set(reply.versions) for _, reply in conversations[0].sampled] == [{bench.version - 1}, {bench.version}]
    return conversations


SCENARIOS = {
    function.__name__: function
    for function in (
        first_last_and_stop_token,
        second_turn_after_a_tool_result,
        shared_group_prompt,
        slot_reused_after_a_longer_tenant,
        evicted_and_prefilled_again,
        both_sides_of_a_chunk_edge,
        after_a_publication_with_kept_slots,
    )
}


def other_weights(params: Params) -> Params:
    """Weights whose keys, values and logits all differ from those of `params`."""
    return {**params, "layers": jax.tree.map(lambda x: 1.05 * x, params["layers"])}
