"""The parity check has teeth: each fault planted in engine or learner makes at least the named situation fail."""

import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.engines import jax_engine, runner, slots
from hermes_jax.learner import logprobs
from hermes_jax.models import attention, layers
from tests.parity.harness import assert_parity, tiny_bench
from tests.parity.scenarios import (
    SCENARIOS,
    after_a_publication_with_kept_slots,
    both_sides_of_a_chunk_edge,
    first_last_and_stop_token,
    second_turn_after_a_tool_result,
    shared_group_prompt,
    slot_reused_after_a_longer_tenant,
)

WINDOWED = {"model_type": "mistral", "sliding_window": 6}


@pytest.fixture(scope="module")
def bench():
    """Its functions are compiled before any fault is planted: for faults in what runs on the host."""
    with tiny_bench(temperature=0.7) as bench:
        bench.score(bench.run(shared_group_prompt))
        yield bench


def assert_detected(bench, scenario):
    trajectories = bench.run(scenario)
    with pytest.raises(AssertionError, match="difference"):
        assert_parity(trajectories, bench.score(trajectories))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_a_fault_there_is_parity(bench, scenario):
    trajectories = bench.run(SCENARIOS[scenario])
    assert_parity(trajectories, bench.score(trajectories))


# Faults of the engine, on the host.


def test_decode_at_a_wrong_position(bench, monkeypatch):
    right = jax_engine.decode_rows

    def wrong(ready, shapes):
        rows = right(ready, shapes)
        return rows._replace(position=rows.position + 1)

    monkeypatch.setattr(jax_engine, "decode_rows", wrong)
    assert_detected(bench, first_last_and_stop_token)


def test_decode_from_a_wrong_token(bench, monkeypatch):
    """The last id of the prompt is fed twice in place of the first sampled one."""
    right = jax_engine.decode_rows

    def wrong(ready, shapes):
        rows = right(ready, shapes)
        for slot in ready:
            rows.token[slot.index] = slot.request.prompt[-1]
        return rows

    monkeypatch.setattr(jax_engine, "decode_rows", wrong)
    assert_detected(bench, first_last_and_stop_token)


def test_engine_logprobs_shifted_by_one(bench, monkeypatch):
    device = bench.engine._runner.result()
    right = device.decode

    def wrong(rows, truncate):
        out = right(rows, truncate)
        return out._replace(logprobs=np.roll(out.logprobs, 1, axis=1))

    monkeypatch.setattr(device, "decode", wrong)
    assert_detected(bench, first_last_and_stop_token)


def test_prefill_at_positions_shifted_by_one(bench, monkeypatch):
    right = runner.padded_chunks

    def wrong(chunks, **shapes):
        ids, positions, rows = right(chunks, **shapes)
        return ids, positions + 1, rows

    monkeypatch.setattr(runner, "padded_chunks", wrong)
    assert_detected(bench, first_last_and_stop_token)


def test_the_last_id_of_a_full_chunk_is_lost(bench, monkeypatch):
    right = runner.padded_chunks

    def wrong(chunks, *, rows, chunk, width):
        cut = [part._replace(ids=part.ids[: chunk - 1]) for part in chunks]
        return right(cut, rows=rows, chunk=chunk, width=width)

    monkeypatch.setattr(runner, "padded_chunks", wrong)
    assert_detected(bench, both_sides_of_a_chunk_edge)


def test_the_tool_result_is_not_prefilled(bench, monkeypatch):
    """A slot that holds the start of a prompt is taken to hold all of it."""
    right = slots.common_prefix
    monkeypatch.setattr(slots, "common_prefix", lambda a, b: len(b) if right(a, b) >= 10 else right(a, b))
    assert_detected(bench, second_turn_after_a_tool_result)


def test_a_stale_slot_is_trusted(bench, monkeypatch):
    monkeypatch.setattr(slots, "common_prefix", lambda a, b: min(len(a), len(b)))
    assert_detected(bench, slot_reused_after_a_longer_tenant)


def test_a_group_prompt_is_copied_from_a_wrong_slot(bench, monkeypatch):
    right = slots.SlotTable.take_copies

    def wrong(table):
        return [((source + 1) % len(table.slots), destination) for source, destination in right(table)]

    monkeypatch.setattr(slots.SlotTable, "take_copies", wrong)
    assert_detected(bench, shared_group_prompt)


def test_kept_slots_survive_a_publication(bench, monkeypatch):
    async def with_fault(bench):  # planted only here: `Bench.run` itself relies on `forget`
        monkeypatch.setattr(slots.SlotTable, "forget", lambda table: None)
        return await after_a_publication_with_kept_slots(bench)

    assert_detected(bench, with_fault)


def test_a_publication_changes_the_version_and_not_the_weights(bench, monkeypatch):
    async def with_fault(bench):
        device = bench.engine._runner.result()
        monkeypatch.setattr(device, "publish", lambda params, version: setattr(device, "version", version))
        return await after_a_publication_with_kept_slots(bench)

    assert_detected(bench, with_fault)


# Faults of the engine, inside of compiled functions: each needs an engine of its own.


def test_decode_sees_one_position_too_many(monkeypatch):
    right = layers.attend_one
    monkeypatch.setattr(layers, "attend_one", lambda q, k, v, positions, window: right(q, k, v, positions + 1, window))
    with tiny_bench() as bench:
        assert_detected(bench, slot_reused_after_a_longer_tenant)


def test_prefill_sees_one_position_too_many(monkeypatch):
    right = layers.cache_mask
    monkeypatch.setattr(layers, "cache_mask", lambda positions, width, window: right(positions + 1, width, window))
    with tiny_bench() as bench:
        assert_detected(bench, slot_reused_after_a_longer_tenant)


def test_the_engine_misses_the_sliding_window(monkeypatch):
    mask, one = layers.cache_mask, layers.attend_one
    monkeypatch.setattr(layers, "cache_mask", lambda positions, width, window: mask(positions, width, None))
    monkeypatch.setattr(layers, "attend_one", lambda q, k, v, positions, window: one(q, k, v, positions, None))
    with tiny_bench(**WINDOWED) as bench:
        assert_detected(bench, second_turn_after_a_tool_result)


def test_the_engine_reports_logprobs_without_temperature(monkeypatch):
    right = runner.sample

    def wrong(logits, banned, controls, *, truncate):
        ids, _ = right(logits, banned, controls, truncate=truncate)
        scores = jnp.where(banned, -jnp.inf, logits)
        top = scores.max(-1)
        chosen = jnp.take_along_axis(scores, ids[:, None], axis=-1)[:, 0]
        return ids, chosen - top - jnp.log(jnp.exp(scores - top[:, None]).sum(-1))

    monkeypatch.setattr(runner, "sample", wrong)
    with tiny_bench(temperature=0.7) as bench:
        assert_detected(bench, first_last_and_stop_token)


# Faults of the learner: on what a sound engine said.


@pytest.fixture(scope="module")
def said(bench):
    return bench.run(second_turn_after_a_tool_result)


def assert_learner_detected(bench, said):
    with pytest.raises(AssertionError, match="difference"):
        assert_parity(said, bench.score(said, bench.scorer()))


def plant_in_batch(monkeypatch, change):
    """Changes the packed batch on its way into the learner's forward."""
    right = logprobs.token_logprobs
    monkeypatch.setattr(
        "hermes_jax.learner.score.token_logprobs",
        lambda params, config, batch, options, **kw: right(params, config, change(batch), options, **kw),
    )


def test_the_learner_forgets_the_temperature(bench, said, monkeypatch):
    plant_in_batch(monkeypatch, lambda batch: batch._replace(temperature=jnp.ones_like(batch.temperature)))
    assert_learner_detected(bench, said)


def test_the_learner_counts_positions_on_over_segments(bench, said, monkeypatch):
    """Rotary angles are relative, so only a shift within a segment shows: here every third position is skipped."""
    plant_in_batch(monkeypatch, lambda batch: batch._replace(positions=batch.positions * 4 // 3))
    assert_learner_detected(bench, said)


def test_segments_leak_into_each_other(bench, said, monkeypatch):
    right = attention.packed_mask

    def wrong(queries, keys, window):
        columns = jnp.broadcast_to(jnp.arange(keys.positions.shape[1]), keys.positions.shape)
        return right(attention.Place(columns, None), attention.Place(columns, None), window)

    monkeypatch.setattr(attention, "packed_mask", wrong)
    assert_learner_detected(bench, said)


def test_the_learner_scores_the_next_token(bench, said, monkeypatch):
    right = logprobs.token_logprobs

    def wrong(*args, **options):
        return tuple(jnp.roll(x, 1, axis=1) for x in right(*args, **options))

    monkeypatch.setattr("hermes_jax.learner.score.token_logprobs", wrong)
    assert_learner_detected(bench, said)


def test_the_learner_does_not_mask_banned_ids(bench, said, monkeypatch):
    monkeypatch.setattr(bench, "banned", None)
    assert_learner_detected(bench, said)


def test_the_learner_misses_the_sliding_window(monkeypatch):
    right = attention.packed_mask
    monkeypatch.setattr(attention, "packed_mask", lambda queries, keys, window: right(queries, keys, None))
    with tiny_bench(**WINDOWED) as bench:
        said = bench.run(second_turn_after_a_tool_result)
        assert_learner_detected(bench, said)


def test_a_token_of_the_tool_result_is_another_one_in_the_learner(bench, said, monkeypatch):
    def change(batch):
        first_of_tool = ~batch.loss_mask & jnp.roll(batch.loss_mask, 1, axis=1)
        return batch._replace(tokens=jnp.where(first_of_tool, (batch.tokens + 1) % 50, batch.tokens))

    plant_in_batch(monkeypatch, change)
    assert_learner_detected(bench, said)


def test_no_fault_above_has_left_a_trace(bench, said):
    assert_parity(said, bench.score(said))
    again = bench.run(second_turn_after_a_tool_result)
    assert_parity(again, bench.score(again))
