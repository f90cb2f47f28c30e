"""The static shapes of the embedded engine, and the arrays that go into its device calls and come out of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from hermes_jax.engines.requests import truncates
from hermes_jax.engines.sampling import Controls, seed_words
from hermes_jax.engines.slots import ChunkRow, Slot


@dataclass(frozen=True)
class Shapes:
    """The static shapes of an engine.

    Args:
        slots: cache rows; every decode step runs all of them. At least 4: a single row takes another matrix routine.
        width: tokens per cache row, prompt and reply together: the context length.
        chunk: ids per prefill chunk.
        prefill_rows: rows of a prefill call, at least 4.
        decode_steps: at most this many tokens per row and device call.
        stop_ids: stop ids per request, at most.
    """

    slots: int
    width: int
    chunk: int = 32
    prefill_rows: int = 8
    decode_steps: int = 8
    stop_ids: int = 8

    def __post_init__(self) -> None:
        for name, least in {
            "slots": 4,
            "prefill_rows": 4,
            "width": 2,
            "chunk": 1,
            "decode_steps": 1,
            "stop_ids": 1,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"the engine needs {name} >= {least}, got {getattr(self, name)}")


class DecodeRows(NamedTuple):
    """What decode needs to know of each slot; idle slots have `left` = 0.

    Args:
        token: the input of the next step: last id of the prompt or last sampled id.
        position: its position.
        left: tokens that may still be sampled.
        stop_ids: padded with -1.
        controls: how to sample; `controls.index` is the number of the next token.
    """

    token: Int[Any, " slot"]
    position: Int[Any, " slot"]
    left: Int[Any, " slot"]
    stop_ids: Int[Any, "slot stop"]
    controls: Controls


class Decoded(NamedTuple):
    """What one decode call sampled: the first `count` entries of a row are its tokens."""

    token_ids: Int[Any, "slot step"]
    logprobs: Float[Any, "slot step"]
    count: Int[Any, " slot"]
    stopped: Bool[Any, " slot"]
    steps: Int[Any, ""]


def padded_chunks(
    chunks: Iterable[ChunkRow], *, rows: int, chunk: int, width: int
) -> tuple[Int[np.ndarray, "row chunk"], Int[np.ndarray, "row chunk"], Int[np.ndarray, " row"]]:
    """Ids, positions and slots of one prefill call; padding sits at position `width`, which is never written."""
    ids = np.zeros((rows, chunk), np.int32)
    positions = np.full((rows, chunk), width, np.int32)
    slots = np.zeros(rows, np.int32)
    for row, (slot, start, part) in enumerate(chunks):
        ids[row, : len(part)] = part
        positions[row, : len(part)] = np.arange(start, start + len(part))
        slots[row] = slot
    return ids, positions, slots


def decode_rows(ready: list[Slot], shapes: Shapes) -> DecodeRows:
    """The state of the slots that decode, as fresh arrays: jax may still read those of the call before."""
    size = shapes.slots
    token, position, left, index = (np.zeros(size, np.int32) for _ in range(4))
    stop_ids = np.full((size, shapes.stop_ids), -1, np.int32)
    seed = np.zeros((size, 2), np.uint32)
    temperature, top_p, min_p = np.ones(size, np.float32), np.ones(size, np.float32), np.zeros(size, np.float32)
    top_k = np.zeros(size, np.int32)
    for slot in ready:
        request, row = slot.request, slot.index
        assert request is not None
        made, sampling = len(request.token_ids), request.sampling
        token[row] = request.token_ids[-1] if made else request.prompt[-1]
        position[row] = len(request.prompt) - 1 + made
        left[row], index[row] = request.limit - made, made
        stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
        seed[row] = seed_words(sampling.seed)
        temperature[row] = sampling.temperature
        if truncates(sampling):
            top_p[row], top_k[row], min_p[row] = sampling.top_p, sampling.top_k, sampling.min_p
    return DecodeRows(token, position, left, stop_ids, Controls(temperature, seed, index, top_p, top_k, min_p))
