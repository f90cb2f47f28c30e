"""What the embedded engine promises beyond bitwise replies: ends of replies, publication, failures, fairness."""

import asyncio
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from hermes_jax.engines.base import EngineError, Sampling
from hermes_jax.engines.device import DeviceThread
from hermes_jax.engines.rows import decode_rows
from tests.engines.tiny import (
    fill_cache,
    full_logits,
    generate_all,
    make_engine,
    random_prompts,
    tiny_config,
    tiny_params,
)

CONFIG = tiny_config()
PARAMS = tiny_params(CONFIG)
BANNED = np.arange(61) >= 55
PROMPTS = random_prompts(12, longest=30)


@pytest.fixture(scope="module")
def device():
    with DeviceThread() as device:
        yield device


VERSIONS = itertools.count(100, 100)


@pytest.fixture(scope="module")
def engine(device):
    engine = make_engine(device, CONFIG, PARAMS, banned=BANNED)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def other_engine(device):
    engine = make_engine(device, CONFIG, PARAMS)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def version():
    """A version of weights that is above those of earlier tests."""
    return next(VERSIONS)


@pytest.fixture
def own_engine(other_engine, version):
    """For tests that change the weights or break something: starts with PARAMS as `version`."""
    asyncio.run(other_engine.publish(PARAMS, version))
    return other_engine


def expected_logprobs(params, prompt, reply, temperature=1.0, banned=BANNED):
    scores = np.where(banned, -np.inf, full_logits(params, CONFIG, prompt + reply.token_ids).astype(np.float64))
    scores /= temperature
    logp = (
        scores
        - np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - scores.max(-1, keepdims=True)
    )
    places = len(prompt) - 1 + np.arange(len(reply.token_ids))
    return logp[places, list(reply.token_ids)]


def test_greedy_equals_argmax_of_the_full_forward(engine):
    for i, reply in generate_all(engine, PROMPTS, temperature=0.0, max_tokens=20).items():
        scores = np.where(BANNED, -np.inf, full_logits(PARAMS, CONFIG, PROMPTS[i] + reply.token_ids))
        start = len(PROMPTS[i]) - 1
        assert reply.token_ids == tuple(scores[start:-1].argmax(-1).tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_full_forward(engine, temperature):
    for i, reply in generate_all(engine, PROMPTS, temperature=temperature).items():
        assert set(reply.token_ids).isdisjoint(np.flatnonzero(BANNED).tolist())
        np.testing.assert_allclose(reply.logprobs, expected_logprobs(PARAMS, PROMPTS[i], reply, temperature), atol=2e-5)


def test_chi_square_of_first_tokens_against_the_full_forward(engine):
    prompt = PROMPTS[3]
    replies = generate_all(engine, [prompt] * 3000, max_tokens=1, temperature=0.8)
    counts = np.bincount([reply.token_ids[0] for reply in replies.values()], minlength=61)
    scores = np.where(BANNED, -np.inf, full_logits(PARAMS, CONFIG, prompt)[-1].astype(np.float64) / 0.8)
    expected = np.exp(scores - scores.max())
    expected *= 3000 / expected.sum()
    rare = expected < 5
    pooled = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(np.append(counts[~rare], counts[rare].sum()), pooled).pvalue > 1e-4


def test_the_same_seed_gives_the_same_reply_and_another_one_another(engine):
    replies = [generate_all(engine, {s: PROMPTS[0]}, [s])[s].token_ids for s in (1, 1, 2, 1 + 2**32, -1)]
    assert replies[0] == replies[1]
    assert len(set(replies)) == 4


def test_stop_ids_end_a_reply_and_are_kept(engine):
    free = generate_all(engine, PROMPTS, max_tokens=12)
    for i, reply in free.items():
        stop = reply.token_ids[5]
        first = reply.token_ids.index(stop)
        [stopped] = generate_all(engine, PROMPTS, [i], stop_ids=(60, stop), max_tokens=12).values()
        assert stopped.token_ids == reply.token_ids[: first + 1]
        assert stopped.finish_reason == "stop"
        assert reply.finish_reason == "length"
        assert len(reply.token_ids) == len(reply.logprobs) == len(reply.versions) == 12


def test_a_stop_id_as_the_last_allowed_token_is_a_stop(engine):
    for i, reply in generate_all(engine, PROMPTS, max_tokens=12).items():
        stop = reply.token_ids[6]
        last = reply.token_ids.index(stop) + 1
        [at_limit] = generate_all(engine, PROMPTS, [i], stop_ids=(stop,), max_tokens=last).values()
        assert (at_limit.finish_reason, len(at_limit.token_ids)) == ("stop", last)


def test_a_full_context_ends_a_reply_by_length(engine):
    prompt = tuple(range(50))
    [reply] = generate_all(engine, [prompt], max_tokens=1000).values()
    assert (reply.finish_reason, len(reply.token_ids)) == ("length", 64 - 50)
    np.testing.assert_allclose(reply.logprobs, expected_logprobs(PARAMS, prompt, reply), atol=2e-5)
    [one] = generate_all(engine, [(7,) * 63], max_tokens=1000).values()
    assert len(one.token_ids) == 1


def test_cancelling_frees_the_slot_and_leaves_the_others_alone(engine):
    expected = generate_all(engine, PROMPTS)
    count = engine.metrics().tokens_generated

    async def main():
        doomed = [asyncio.ensure_future(engine.generate((1, 2, i), Sampling(max_tokens=60))) for i in range(20)]
        while engine.metrics().tokens_generated == count:  # then some decode and some wait
            await asyncio.sleep(0)
        mine = [asyncio.ensure_future(engine.generate(p, Sampling(12, seed=i))) for i, p in enumerate(PROMPTS)]
        await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        replies = await asyncio.gather(*mine)
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*doomed, return_exceptions=True))
        return replies

    assert dict(enumerate(asyncio.run(main()))) == expected
    assert not engine._table.active


def test_more_episodes_than_slots_all_come_to_an_end(engine):
    """Three times more multi-turn episodes than slots; each waits a little between its turns."""

    async def episode(name):
        prompt = (name, name + 1)
        for turn in range(4):
            reply = await engine.generate(prompt, Sampling(max_tokens=5, seed=turn), session=name)
            prompt = prompt + reply.token_ids + (turn,)
            await asyncio.sleep(0.001 * (name % 3))
        return len(prompt)

    async def main():
        return await asyncio.wait_for(asyncio.gather(*(episode(name) for name in range(15))), 60)

    assert asyncio.run(main()) == [2 + 4 * 6] * 15


def test_the_event_loop_is_free_while_the_engine_works(engine):
    async def main():
        work = asyncio.ensure_future(
            asyncio.gather(*(engine.generate((i,), Sampling(max_tokens=60, seed=i)) for i in range(40)))
        )
        lags = []
        while not work.done():
            started = time.monotonic()
            await asyncio.sleep(0)
            lags.append(time.monotonic() - started)
            await asyncio.sleep(0.002)
        return lags

    lags = asyncio.run(main())
    assert len(lags) > 5
    assert np.median(lags) < 0.05


def test_metrics_count(engine):
    fill_cache(engine, 0.0)
    before = engine.metrics()
    replies = generate_all(engine, [tuple(range(20))] * 4, max_tokens=6)
    after = engine.metrics()
    assert after.tokens_generated - before.tokens_generated == 24 == sum(len(r.token_ids) for r in replies.values())
    assert after.prefill_tokens - before.prefill_tokens == 19
    assert after.prompt_tokens - before.prompt_tokens == 80
    assert after.copied_slots - before.copied_slots == 3
    assert after.decode_steps - before.decode_steps == 6
    assert after.decode_calls - before.decode_calls == 2
    assert after.busy_s > before.busy_s


def test_publishing_swaps_weights_versions_and_everything_kept(own_engine, version):
    engine, other = own_engine, tiny_params(CONFIG, seed=1)
    prompt = tuple(range(20))
    none = np.zeros(61, bool)

    async def turn(session, seed=5):
        return await engine.generate(prompt, Sampling(max_tokens=9, seed=seed), session=session)

    async def main():
        old = await turn("kept")
        await engine.publish(other, version + 7)
        return old, await turn("kept"), await turn("fresh")

    old, kept, fresh = asyncio.run(main())
    assert set(old.versions) == {version}
    assert set(kept.versions) == {version + 7}
    assert kept == fresh
    assert kept.token_ids != old.token_ids
    np.testing.assert_allclose(old.logprobs, expected_logprobs(PARAMS, prompt, old, banned=none), atol=2e-5)
    np.testing.assert_allclose(kept.logprobs, expected_logprobs(other, prompt, kept, banned=none), atol=2e-5)


def test_replies_in_flight_end_under_the_old_weights(own_engine, version):
    engine, other = own_engine, tiny_params(CONFIG, seed=1)
    before = generate_all(engine, PROMPTS, max_tokens=40)

    async def main():
        asked = [
            asyncio.ensure_future(engine.generate(p, Sampling(max_tokens=40, seed=i))) for i, p in enumerate(PROMPTS)
        ]
        while engine.metrics().tokens_generated == count:
            await asyncio.sleep(0.001)
        await engine.publish(other, version + 1)
        assert sum(task.done() for task in asked) >= 5  # those that had a slot
        return await asyncio.gather(*asked)

    count = engine.metrics().tokens_generated
    during = dict(enumerate(asyncio.run(main())))
    after = generate_all(engine, PROMPTS, max_tokens=40)
    versions = [set(reply.versions) for reply in during.values()]
    assert all(len(v) == 1 for v in versions)
    assert {version} in versions
    assert {version + 1} in versions
    for i, reply in during.items():
        assert reply == (before[i] if set(reply.versions) == {version} else after[i])


def test_the_engine_owns_its_weights(device):
    """The learner donates its arrays: they may be gone the moment after."""
    params = jax.tree.map(jnp.copy, PARAMS)
    engine = make_engine(device, CONFIG, params)

    async def main():
        await engine._runner
        jax.tree.map(lambda x: x.delete(), params)
        first = await engine.generate((1, 2, 3), Sampling(max_tokens=4))
        again = jax.tree.map(jnp.copy, PARAMS)
        await engine.publish(again, 1)
        jax.tree.map(lambda x: x.delete(), again)
        second = await engine.generate((1, 2, 3), Sampling(max_tokens=4))
        await engine.close()
        return first, second

    first, second = asyncio.run(main())
    assert first.token_ids == second.token_ids


def test_weights_that_do_not_fit_are_refused_and_good_ones_still_go(own_engine, version):
    async def main():
        with pytest.raises(EngineError, match=f"weights {version + 3} could not be published"):
            await own_engine.publish({"layers": ()}, version + 3)
        with pytest.raises(EngineError, match=r"embed.embedding: shape \(62, 32\), .* has \(61, 32\)"):
            await own_engine.publish(tiny_params(tiny_config(vocab_size=62)), version + 3)
        old = await own_engine.generate((1,), Sampling(max_tokens=2))
        assert old.versions == (version, version)
        await own_engine.publish(PARAMS, version + 3)
        return await own_engine.generate((1,), Sampling(max_tokens=2))

    assert asyncio.run(main()).versions == (version + 3, version + 3)


def test_weights_with_nan_fail_the_request_and_say_so(own_engine, version):
    async def main():
        await own_engine.publish(jax.tree.map(lambda x: x * jnp.nan, PARAMS), version + 2)
        with pytest.raises(EngineError, match=f"'r1'.*not finite under weights {version + 2}"):
            await own_engine.generate((1,), Sampling(max_tokens=2), request_id="r1")
        await own_engine.publish(PARAMS, version + 3)
        return await own_engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=0))

    reply = asyncio.run(main())
    none = np.zeros(61, bool)
    np.testing.assert_allclose(reply.logprobs, expected_logprobs(PARAMS, PROMPTS[0], reply, banned=none), atol=2e-5)


def test_versions_only_go_up(own_engine, version):
    async def main():
        for wrong in (version, version - 1, 0):
            with pytest.raises(
                ValueError, match=rf"weights {wrong} can't follow weights {version}: .* {version + 1} or later"
            ):
                await own_engine.publish(PARAMS, wrong)
        later = asyncio.ensure_future(own_engine.publish(PARAMS, version + 5))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match=f"can't follow weights {version + 5}"):  # not even there yet
            await own_engine.publish(PARAMS, version + 4)
        await later
        return await own_engine.generate((1,), Sampling(max_tokens=2))

    assert asyncio.run(main()).versions == (version + 5, version + 5)


def test_a_failed_device_call_fails_what_is_in_flight_and_not_the_engine(own_engine):
    expected = generate_all(own_engine, PROMPTS)
    runner = own_engine._runner.result()
    decode = runner.decode

    def broken(rows, truncate):
        runner.cache = jax.tree.map(lambda x: x.delete(), runner.cache)
        raise RuntimeError("out of memory")

    async def main():
        runner.decode = broken
        results = await asyncio.gather(
            *(own_engine.generate((i,), Sampling(max_tokens=2)) for i in range(9)), return_exceptions=True
        )
        runner.decode = decode
        return results

    failures = asyncio.run(main())
    assert all(isinstance(e, EngineError) and "out of memory" in str(e) for e in failures)
    assert generate_all(own_engine, PROMPTS) == expected


def test_close_fails_what_is_in_flight_and_later_requests(device):
    engine = make_engine(device, CONFIG, PARAMS)

    async def main():
        asked = [asyncio.ensure_future(engine.generate((i,), Sampling(max_tokens=60))) for i in range(9)]
        while not engine._table.active:
            await asyncio.sleep(0.001)
        await engine.close()
        await engine.close()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(result, EngineError) and "closed" in str(result) for result in results)
        with pytest.raises(EngineError, match=r"'late'.*closed"):
            await engine.generate((1,), Sampling(max_tokens=1), request_id="late")
        with pytest.raises(EngineError, match="closed"):
            await engine.publish(PARAMS, 1)

    asyncio.run(main())
    assert device.submit(int).result() == 0  # the thread belongs to others, too


def test_an_event_loop_that_ends_mid_reply_leaves_a_usable_engine(engine):
    expected = generate_all(engine, PROMPTS)

    async def leave():
        asyncio.ensure_future(engine.generate((1, 2), Sampling(max_tokens=60)))  # noqa: RUF006
        await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert generate_all(engine, PROMPTS) == expected


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ((), {}, "the prompt is empty"),
        ((1,) * 64, {}, "64 tokens leaves no room for a reply in a context of 64"),
        ((1, 61), {}, r"prompt id 61 at position 1 lies outside of the vocabulary \[0, 61\)"),
        ((-1,), {}, "prompt id -1 at position 0"),
        ((1,), {"temperature": -0.1}, "temperature=-0.1"),
        ((1,), {"temperature": float("nan")}, "temperature=nan"),
        ((1,), {"max_tokens": 0}, "max_tokens=0"),
        ((1,), {"stop_ids": tuple(range(9))}, "9 stop ids"),
        ((1,), {"top_p": 0.9}, "would not be those of the behaviour policy"),
        ((1,), {"top_k": 5}, "evaluation only"),
        ((1,), {"min_p": 0.1, "top_k": 3}, "evaluation only"),
        ((1,), {"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\]"),
    ],
)
def test_bad_requests_are_refused_by_name(engine, prompt, options, message):
    with pytest.raises(EngineError, match=rf"'ep 4 turn 2'.*{message}"):
        asyncio.run(engine.generate(prompt, Sampling(**{"max_tokens": 4, **options}), request_id="ep 4 turn 2"))


def test_truncation_is_for_evaluation(engine):
    engine.allow_truncation = True
    try:
        best = generate_all(engine, PROMPTS, top_k=1)
        greedy = generate_all(engine, PROMPTS, temperature=0.0, top_k=1)
    finally:
        engine.allow_truncation = False
    for i, reply in best.items():
        assert reply.token_ids == greedy[i].token_ids
        assert reply.logprobs == (0.0,) * 12
        np.testing.assert_allclose(greedy[i].logprobs, expected_logprobs(PARAMS, PROMPTS[i], greedy[i]), atol=2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 3}, "slots >= 4, got 3"),
        ({"prefill_rows": 1}, "prefill_rows >= 4"),
        ({"width": 257}, "exceeds the model's context of 256"),
        ({"banned": np.ones(61, bool)}, "must leave one"),
        ({"banned": np.zeros(60, bool)}, "each of 61 ids"),
    ],
)
def test_engines_that_cannot_work_are_refused(device, options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(device, CONFIG, PARAMS, **options)


def test_decode_updates_the_cache_in_place(engine):
    """Donated buffers come back at the same addresses: a decode call copies no cache."""
    generate_all(engine, PROMPTS[:2])
    runner = engine._runner.result()

    def addresses():
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(runner.cache)]

    before = addresses()
    generate_all(engine, PROMPTS[:2], max_tokens=20)
    assert addresses() == before


def test_decode_needs_no_scratch_copy_of_the_cache(device):
    engine = make_engine(device, CONFIG, PARAMS, slots=64, width=256)
    runner = engine._runner.result()

    def scratch_bytes():
        lowered = runner._decode.lower(
            runner.params, runner.cache, decode_rows([], engine.shapes), runner.banned, truncate=False
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(runner.cache))
    assert device.submit(scratch_bytes).result() < cache_bytes / 4
    asyncio.run(engine.close())
