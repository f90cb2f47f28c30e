"""Engine and learner give the same log-probs for the same tokens, fp32, on a real model."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from hermes_jax.engines.base import Sampling
from hermes_jax.engines.device import DeviceThread
from hermes_jax.engines.jax_engine import JaxEngine
from hermes_jax.models.hf import load_model
from hermes_jax.models.tokenizer import banned_ids, load_tokenizer
from tests.parity.harness import Bench, assert_parity, tiny_bench
from tests.parity.scenarios import SCENARIOS, first_last_and_stop_token, other_weights

TEXT = """A harbour town wakes early. The first boats leave before the light, and the women who mend nets sit on the
quay with tea in tin cups. At seven the baker opens; by eight the school bell rings, and the narrow street that climbs
to the church is full of children who argue about marbles. In the archive of the town hall there is a book from 1783
with 412 pages of weather: wind, rain, ice on the river, the day when the bridge fell. `ls -l /var/log | wc -l` prints
27. Write a function that returns the sum of two numbers, then explain what a transformer is: a network that attends
to every earlier word at once. The capital of France is Paris; the capital of Peru is Lima, and 17 times 3 is 51.
Nobody in the town believes in the sea monster, yet every captain leaves a coin under the mast for it."""


@pytest.fixture(scope="module")
def bench(smollm2):
    config, params = load_model(smollm2)
    tokenizer = load_tokenizer(smollm2)
    banned = banned_ids(config, tokenizer)
    banned[tokenizer.unk_token_id] = True
    text = tuple(tokenizer(TEXT)["input_ids"])
    with DeviceThread() as device:
        engine = JaxEngine(
            params, config, slots=4, width=96, banned=banned, device_thread=device, chunk=16, prefill_rows=4
        )
        yield Bench(engine, config, {0: params, 1: other_weights(params)}, text, banned, width=96)
        asyncio.run(engine.close())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_smollm2(bench, scenario):
    trajectories = bench.run(SCENARIOS[scenario])
    assert_parity(trajectories, bench.score(trajectories))


def test_smollm2_at_temperature_0_7(bench):
    cool = replace(bench, temperature=0.7)
    trajectories = cool.run(first_last_and_stop_token)
    assert {float(x) for t in trajectories for x in t.temperature[t.mask]} == {float(np.float32(0.7))}
    assert_parity(trajectories, bench.score(trajectories))


@pytest.fixture(scope="module")
def windowed():
    """A tiny Mistral whose window is shorter than a prefill chunk and than every conversation."""
    with tiny_bench(model_type="mistral", sliding_window=6) as bench:
        yield bench


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sliding_window(windowed, scenario):
    trajectories = windowed.run(SCENARIOS[scenario])
    assert_parity(trajectories, windowed.score(trajectories))


def test_greedy_equals_transformers(bench, smollm2):
    """20 prompts of 4 lengths, 32 tokens each."""
    import torch
    from transformers import AutoModelForCausalLM

    lengths = (9, 17, 32, 50)
    prompts = {n: [bench.prompt(5 * n + i, n) for i in range(5)] for n in lengths}
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # 32 tokens each, whatever they are

    async def ask():
        await bench.publish(0)
        asked = [bench.engine.generate(p, Sampling(32, temperature=0.0)) for n in lengths for p in prompts[n]]
        return await asyncio.gather(*asked)

    mine = [list(reply.token_ids) for reply in asyncio.run(ask())]
    theirs, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # its threads spin where another process wants the core
    for n in lengths:
        with torch.no_grad():
            out = model.generate(torch.tensor(prompts[n]), do_sample=False, max_new_tokens=32, pad_token_id=0)
        theirs += out[:, n:].tolist()
    torch.set_num_threads(threads)
    assert mine == theirs
