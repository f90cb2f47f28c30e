"""A tiny random model with an engine around it, for tests that need a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hermes_jax.engines.base import Completion, Sampling
from hermes_jax.engines.device import DeviceThread
from hermes_jax.engines.jax_engine import JaxEngine
from hermes_jax.models.config import ModelConfig
from hermes_jax.models.head import logits
from hermes_jax.models.transformer import Params, forward, head_weight, init_params

Prompt = tuple[int, ...]


def tiny_config(**changes: Any) -> ModelConfig:
    """Qwen3-type, 2 layers, 61 ids; `changes` are keys of config.json."""
    hf = {
        "model_type": "qwen3",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    return ModelConfig.from_hf({**hf, **changes})


def tiny_params(config: ModelConfig, seed: int = 0) -> Params:
    """Random weights, large enough that attention and mistakes in it show in the log-probs."""
    params = init_params(config, jax.random.key(seed))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
    noisy = [leaf + 0.25 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def random_prompts(count: int, *, longest: int = 40, vocab: int = 61, seed: int = 0) -> list[Prompt]:
    """Prompts of 1 to `longest` random ids."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, vocab, rng.integers(1, longest + 1)).tolist()) for _ in range(count)]


def make_engine(device: DeviceThread, config: ModelConfig, params: Params, **options: Any) -> JaxEngine:
    """An engine of small shapes with odd numbers of rows."""
    shapes = {"slots": 5, "width": 64, "chunk": 8, "prefill_rows": 4, "decode_steps": 3}
    return JaxEngine(params, config, device_thread=device, **{**shapes, **options})


def generate_all(
    engine: JaxEngine, prompts: Sequence[Prompt], order: Iterable[int] | None = None, **sampling: Any
) -> dict[int, Completion]:
    """Replies to the prompts, all asked for at once in the given order; prompt i has seed i."""
    order = list(range(len(prompts)) if order is None else order)

    async def ask() -> list[Completion]:
        asked = (engine.generate(prompts[i], Sampling(**{"max_tokens": 12, "seed": i, **sampling})) for i in order)
        return await asyncio.gather(*asked)

    return dict(zip(order, asyncio.run(ask()), strict=True))


def full_logits(params: Params, config: ModelConfig, ids: Sequence[int], room: int = 64) -> np.ndarray:
    """fp32 logits [time, vocab] of one sequence of at most `room` ids by the cache-free forward."""
    tokens = np.zeros((1, room), np.int32)  # padding at the end: no token sees it
    tokens[0, : len(ids)] = ids
    return np.asarray(_full_logits(params, tokens, config=config))[: len(ids)]


@partial(jax.jit, static_argnames="config")
def _full_logits(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    hidden, _ = forward(params, config, tokens, jnp.arange(tokens.shape[1])[None])
    return logits(hidden[0], head_weight(params))


def fill_cache(engine: JaxEngine, value: float) -> None:
    """Overwrites every entry of the idle engine's cache; the engine then trusts none of it, as after a publication."""
    runner = engine._runner.result()

    def fill() -> None:
        runner.cache = jax.tree.map(lambda x: jnp.full_like(x, value), runner.cache)

    engine._device.submit(fill).result()
    engine._table.forget()
