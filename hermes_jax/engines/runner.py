"""The embedded engine's side of the device thread: weights, cache and the few jitted calls that touch them.

All shapes are fixed when the engine is built: nothing recompiles later. Each row of a call is computed as if it were
alone, because a row's arithmetic depends only on the call's shapes and the row's own values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from hermes_jax.engines.rows import Decoded, DecodeRows, Shapes, padded_chunks
from hermes_jax.engines.sampling import sample
from hermes_jax.engines.slots import ChunkRow
from hermes_jax.models.config import ModelConfig
from hermes_jax.models.head import logits
from hermes_jax.models.transformer import (
    KVCache,
    Params,
    abstract_params,
    forward,
    head_weight,
    init_cache,
    unstack_layers,
)


@dataclass
class Compilations:
    """Counts how often jax traced (and so compiled) one of the engine's functions."""

    count: int = 0


class _Loop(NamedTuple):
    """State of the decode loop."""

    cache: KVCache
    rows: DecodeRows
    out: Decoded


class ModelRunner:
    """Owns the engine's arrays. Every method runs on the device thread.

    Args:
        banned: ids that are never sampled, one flag per row of the head.
        dtype: of the engine's copy of the weights, of its matrix products and of its cache.
    """

    def __init__(
        self, config: ModelConfig, shapes: Shapes, banned: Bool[np.ndarray, " vocab"], dtype: DTypeLike = jnp.float32
    ) -> None:
        self.config, self.shapes, self.dtype = config, shapes, dtype
        self.compilations = Compilations()
        self.banned = jnp.asarray(banned)
        self.params: Params | None = None
        self.version = -1
        self.cache = init_cache(config, shapes.slots, shapes.width, dtype)
        self._prefill = self._jit(self._prefill_step, donate=1)
        self._decode = self._jit(self._decode_loop, donate=1, static="truncate")
        self._copy = self._jit(_copy_rows, donate=0)
        self._own = self._jit(partial(_own_params, dtype=dtype))

    def publish(self, params: Params, version: int) -> None:
        """Takes over weights as real copies, one array per layer: the learner may donate its own at once.

        Raises:
            ValueError: they are not those of the model; the old ones stay.
        """
        _check_params(params, self.config)
        self.params = None  # free the old ones first: the peak holds one copy
        self.params = self._own(params)
        jax.block_until_ready(self.params)
        self.version = version

    def reset(self) -> None:
        """A fresh cache, after a failed call may have left none."""
        self.cache = init_cache(self.config, self.shapes.slots, self.shapes.width, self.dtype)

    def prefill(self, copies: Sequence[tuple[int, int]], chunks: Sequence[ChunkRow]) -> None:
        """Copies whole cache rows (source, destination), then writes the K/V of the chunks."""
        rows = self.shapes.prefill_rows
        for start in range(0, len(copies), rows):
            part = np.full((rows, 2), self.shapes.slots, np.int32)  # beyond the last slot: dropped
            part[: len(copies[start : start + rows])] = copies[start : start + rows]
            self.cache = self._copy(self.cache, part)
        if chunks:
            call = padded_chunks(chunks, rows=rows, chunk=self.shapes.chunk, width=self.shapes.width)
            self.cache = self._prefill(self._weights(), self.cache, *call)

    def decode(self, rows: DecodeRows, truncate: bool) -> Decoded:
        """Samples up to `decode_steps` tokens in every slot that has tokens left; waits for the result."""
        self.cache, out = self._decode(self._weights(), self.cache, rows, self.banned, truncate=truncate)
        return jax.device_get(out)

    def _weights(self) -> Params:
        if self.params is None:
            raise RuntimeError("the engine has no weights: the last publication failed halfway; publish again")
        return self.params

    def _jit(self, function, *, donate: int | None = None, static: str | None = None):
        @partial(jax.jit, donate_argnums=() if donate is None else donate, static_argnames=static)
        def traced(*args, **options):
            self.compilations.count += 1  # runs when jax traces, that is once per compilation
            return function(*args, **options)

        return traced

    def _forward(
        self, params: Params, cache: KVCache, ids: Array, positions: Array, slots: Array | None = None
    ) -> tuple[Float[Array, "row time hidden"], KVCache]:
        hidden, updated = forward(
            params, self.config, ids, positions, cache=cache, slots=slots, compute_dtype=self.dtype
        )
        assert updated is not None  # a cache went in
        return hidden, updated

    def _prefill_step(self, params: Params, cache: KVCache, ids: Array, positions: Array, slots: Array) -> KVCache:
        return self._forward(params, cache, ids, positions, slots)[1]

    def _decode_loop(
        self, params: Params, cache: KVCache, rows: DecodeRows, banned: Array, *, truncate: bool
    ) -> tuple[KVCache, Decoded]:
        slots, steps = self.shapes.slots, self.shapes.decode_steps
        nothing = Decoded(
            token_ids=jnp.zeros((slots, steps), jnp.int32),
            logprobs=jnp.zeros((slots, steps), jnp.float32),
            count=jnp.zeros(slots, jnp.int32),
            stopped=jnp.zeros(slots, bool),
            steps=jnp.zeros((), jnp.int32),
        )

        def goes_on(loop: _Loop) -> Array:
            return (loop.out.steps < steps) & (loop.rows.left > 0).any()

        def step(loop: _Loop) -> _Loop:
            return self._decode_step(params, banned, loop, truncate)

        end = jax.lax.while_loop(goes_on, step, _Loop(cache, jax.tree.map(jnp.asarray, rows), nothing))
        return end.cache, end.out

    def _decode_step(self, params: Params, banned: Array, loop: _Loop, truncate: bool) -> _Loop:
        """One token for each live row. Idle rows run along at position `width`, where nothing is written."""
        rows, out = loop.rows, loop.out
        live = rows.left > 0
        position = jnp.where(live, rows.position, self.shapes.width)
        hidden, cache = self._forward(params, loop.cache, rows.token[:, None], position[:, None])
        ids, logprobs = sample(logits(hidden[:, 0], head_weight(params)), banned, rows.controls, truncate=truncate)
        stops = live & (ids[:, None] == rows.stop_ids).any(axis=-1)
        taken = live.astype(jnp.int32)
        rows = rows._replace(
            token=jnp.where(live, ids, rows.token),
            position=rows.position + taken,
            left=jnp.where(stops, 0, rows.left - taken),
            controls=rows.controls._replace(index=rows.controls.index + taken),
        )
        out = Decoded(
            token_ids=out.token_ids.at[:, out.steps].set(ids),
            logprobs=out.logprobs.at[:, out.steps].set(logprobs),
            count=out.count + taken,
            stopped=out.stopped | stops,
            steps=out.steps + 1,
        )
        return _Loop(cache, rows, out)


def _copy_rows(cache: KVCache, pairs: Int[Array, "pair 2"]) -> KVCache:
    source, destination = pairs[:, 0], pairs[:, 1]
    return jax.tree.map(lambda x: x.at[destination].set(x[source], mode="drop"), cache)


def _own_params(params: Params, *, dtype: DTypeLike) -> Params:
    """Per-layer copies in the engine's dtype; `copy` because jit would hand unchanged inputs back as they are."""
    return unstack_layers(jax.tree.map(lambda x: jnp.copy(x).astype(dtype), params))


def _check_params(params: Params, config: ModelConfig) -> None:
    """Names the first array that is missing, unknown or of the wrong shape."""
    given, expected = (_shapes_by_name(tree) for tree in (params, abstract_params(config)))
    for name in sorted(given.keys() | expected.keys()):
        if given.get(name) != expected.get(name):
            raise ValueError(f"{name}: shape {given.get(name)}, but the engine's model has {expected.get(name)}")


def _shapes_by_name(params: Params) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
