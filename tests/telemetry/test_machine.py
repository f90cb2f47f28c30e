"""Lag of the event loop, compilations, FLOPs."""

from __future__ import annotations

import asyncio
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.telemetry.compilations import Compilations
from hermes_jax.telemetry.flops import TransformerShape, attended_pairs, measure_peak, mfu, train_flops
from hermes_jax.telemetry.lag import LoopLag


def test_a_blocked_loop_is_seen():
    async def main():
        lag = LoopLag(interval_s=0.005)
        lag.start()
        await asyncio.sleep(0.05)
        lag.take()
        time.sleep(0.2)
        running = lag.take()
        await asyncio.sleep(0.02)
        after = lag.take()
        await asyncio.sleep(0.02)
        lag.stop()
        lag.stop()
        return running, after, lag.take()

    running, after, last = asyncio.run(main())
    assert 0.15 <= running < 20, "a delay that is still going on counts"
    assert 0.15 <= after < 20
    assert last < after, "each value is read once"


def test_compilations_are_counted_once_each():
    with Compilations() as compilations:
        function = jax.jit(lambda x: x * 3 + 1)
        x, y = jnp.ones(7), jnp.ones(11)
        jax.block_until_ready((x, y))
        compilations.take()
        function(x).block_until_ready()
        function(x).block_until_ready()
        assert compilations.take()[0] == 1
        function(y).block_until_ready()
        new, seconds = compilations.take()
        assert new == 1
        assert seconds > 0
        assert compilations.take() == (0, 0.0)
        total = compilations.count
    jax.jit(lambda x: x - 17)(x).block_until_ready()
    assert compilations.count == total
    assert compilations.seconds > 0


TINY = TransformerShape(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocab=100)


def test_matmul_parameters_of_a_real_model():
    from hermes_jax.models.config import ModelConfig
    from hermes_jax.models.transformer import abstract_params

    config = ModelConfig.from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    names = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    matrices = sum(leaf.size for name, leaf in names if name.endswith("kernel") or name == "head/weight")
    assert TINY.matmul_parameters == matrices


def test_train_flops_against_counting_by_hand():
    lengths = [3, 5]
    forward = 2 * TINY.matmul_parameters * 8
    pairs = (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)
    attention = 2 * TINY.layers * 2 * TINY.heads * TINY.head_dim * pairs
    assert train_flops(TINY, lengths) == 3 * (forward + attention)
    assert train_flops(TINY, []) == 0


@pytest.mark.parametrize("window", [1, 3, 5, 9])
def test_pairs_in_a_window(window):
    for n in range(12):
        counted = sum(min(i + 1, window) for i in range(n))
        assert attended_pairs(np.array([float(n)]), window)[0] == counted


def test_peak_and_mfu():
    peak = measure_peak(size=128, seconds=0.02)
    assert 1e6 < peak < 1e16
    assert mfu(peak, 2.0, peak) == pytest.approx(0.5)
    assert mfu(1.0, 0.0, peak) == 0.0
