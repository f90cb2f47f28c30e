"""A reply is a bitwise function of (weights, prompt ids, sampling, seed), whatever else the engine does."""

import asyncio

import numpy as np
import pytest

from hermes_jax.engines.base import Sampling
from hermes_jax.engines.device import DeviceThread
from tests.engines.tiny import fill_cache, generate_all, make_engine, random_prompts, tiny_config, tiny_params

PROMPTS = random_prompts(14)
MODELS = {
    "qwen3": {},
    "mistral-window": {"model_type": "mistral", "sliding_window": 6, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module", params=MODELS)
def engine(request):
    config = tiny_config(**MODELS[request.param])
    with DeviceThread() as device:
        engine = make_engine(device, config, tiny_params(config))
        yield engine
        asyncio.run(engine.close())


@pytest.fixture(scope="module")
def alone(engine):
    """Every reply made by itself, in a fresh cache full of zeros."""
    replies = {}
    for i in range(len(PROMPTS)):
        fill_cache(engine, 0.0)
        replies |= generate_all(engine, PROMPTS, [i])
    assert len({reply.token_ids for reply in replies.values()}) == len(PROMPTS)
    return replies


def test_together(engine, alone):
    assert generate_all(engine, PROMPTS) == alone


@pytest.mark.parametrize("seed", range(3))
def test_permuted(engine, alone, seed):
    order = np.random.default_rng(seed).permutation(len(PROMPTS)).tolist()
    assert generate_all(engine, PROMPTS, order) == alone


def test_in_slots_reused_after_longer_tenants_with_a_cache_full_of_1e9(engine, alone):
    generate_all(engine, random_prompts(10, longest=50, seed=9), max_tokens=60)
    fill_cache(engine, 1e9)
    for i in range(len(PROMPTS)):
        assert generate_all(engine, PROMPTS, [i])[i] == alone[i]


def test_by_a_prompt_kept_in_full_and_by_one_copied(engine, alone):
    fill_cache(engine, 1e9)
    for i in range(len(PROMPTS)):
        same = [PROMPTS[i]] * 3
        before = engine.metrics()
        first, second = generate_all(engine, same, [0]), generate_all(engine, same, [1])
        after = engine.metrics()
        assert after.prefill_tokens - before.prefill_tokens <= len(PROMPTS[i]) - 1
        assert generate_all(engine, same) == first | second | generate_all(engine, same, [2])
        assert generate_all(engine, {i: PROMPTS[i]}, [i])[i] == alone[i]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 24, 25])
def test_on_both_sides_of_a_chunk_edge_with_full_and_empty_prefill_calls(engine, length):
    rng = np.random.default_rng(length)
    prompts = [tuple(rng.integers(0, 61, length).tolist()) for _ in range(5)]
    full = generate_all(engine, prompts, max_tokens=20)
    for i in range(5):
        fill_cache(engine, 1e9)
        assert generate_all(engine, prompts, [i], max_tokens=20)[i] == full[i]


def test_independent_of_how_many_tokens_a_device_call_makes(engine, alone):
    """A reply of n tokens begins with the reply of fewer: calls are cut anywhere."""
    for limit in (1, 2, 3, 4, 7):
        short = generate_all(engine, PROMPTS, max_tokens=limit)
        for i, reply in short.items():
            assert reply.token_ids == alone[i].token_ids[:limit]
            assert reply.logprobs == alone[i].logprobs[:limit]


def test_beside_truncated_and_greedy_neighbours(engine, alone):
    engine.allow_truncation = True

    async def ask():
        wild = [
            engine.generate(prompt, Sampling(max_tokens=9, seed=i, **options))
            for i, prompt in enumerate(PROMPTS)
            for options in ({"top_p": 0.8}, {"temperature": 0.0, "top_k": 3})
        ]
        mine = [engine.generate(prompt, Sampling(max_tokens=12, seed=i)) for i, prompt in enumerate(PROMPTS)]
        return (await asyncio.gather(*mine, *wild))[: len(mine)]

    try:
        assert dict(enumerate(asyncio.run(ask()))) == alone
    finally:
        engine.allow_truncation = False


def episode(engine, name, session):
    """Three turns; each prompt is the one before with its reply and the ids of a tool result."""
    rng = np.random.default_rng(name)

    async def run():
        prompt, turns = tuple(rng.integers(0, 61, int(rng.integers(3, 12))).tolist()), []
        for turn in range(3):
            reply = await engine.generate(
                prompt, Sampling(max_tokens=7, seed=10 * name + turn, stop_ids=(3, 4)), session=session
            )
            turns.append((prompt, reply))
            prompt = prompt + reply.token_ids + tuple(rng.integers(0, 61, 5).tolist())
        await engine.release(session)
        return turns

    return run()


def test_episodes_in_kept_in_evicted_and_in_fresh_slots(engine):
    async def run(names, prefix):
        return await asyncio.gather(*(episode(engine, n, None if prefix is None else (prefix, n)) for n in names))

    kept = [asyncio.run(run([n], "kept"))[0] for n in range(15)]
    evicted = asyncio.run(run(range(15), "evicted"))  # three times more episodes than slots
    without_session = asyncio.run(run(range(15), None))
    assert kept == evicted == without_session
    for turns in kept[:5]:
        for turn, (prompt, reply) in enumerate(turns):
            fill_cache(engine, 1e9)
            name = kept.index(turns)
            sampling = Sampling(max_tokens=7, seed=10 * name + turn, stop_ids=(3, 4))
            assert asyncio.run(engine.generate(prompt, sampling)) == reply


def test_nothing_recompiles_after_the_first_round(engine, alone):
    generate_all(engine, PROMPTS)
    before = engine.metrics().compilations
    generate_all(engine, random_prompts(20, seed=3), max_tokens=30, temperature=0.3, stop_ids=(1, 2))
    assert engine.metrics().compilations == before
