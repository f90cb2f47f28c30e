"""A small made-up batch, in any layout: what a loss is tried on before it meets a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hermes_jax.objectives.objective import PolicyBatch

LENGTHS = (5, 9, 3, 7, 6, 8, 4)
"""Tokens of the sequences; none of the last one's is trained."""
ONE_PER_ROW = tuple((n,) for n in range(len(LENGTHS)))
INTEGERS = ("loss_mask", "segment_ids", "positions", "turn", "policy_version")
_PADDING = {"turn": -1, "policy_version": -1, "temperature": 1.0}

MadeUp = list[dict[str, np.ndarray]]
"""Arrays of `PolicyBatch` by name, one dict per sequence."""


def made_up_sequences(seed: int = 0) -> MadeUp:
    """Two turns each, with a tool's tokens between; ratios to both sides of the usual clip range; float64."""
    rng = np.random.default_rng(seed)
    return [_sequence(rng, length, trained=n < len(LENGTHS) - 1) for n, length in enumerate(LENGTHS)]


def _sequence(rng: np.random.Generator, length: int, *, trained: bool) -> dict[str, np.ndarray]:
    positions = np.arange(length)
    sampled = (positions > 0) & (positions != length // 2)
    logprobs = -rng.gamma(2.0, 0.7, length) - 0.05
    old = np.minimum(logprobs + rng.normal(0, 0.3, length), -1e-3)
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "ref_logprobs": np.minimum(logprobs + rng.normal(0, 0.4, length), -1e-3),
        "rollout_logprobs": np.minimum(old + rng.normal(0, 0.02, length), -1e-3),
        "advantages": np.full(length, rng.normal() + rng.choice([-0.5, 0.5])),
        "entropy": rng.uniform(0.1, 2.0, length),
        "loss_mask": sampled & trained,
        "positions": positions,
        "turn": np.where(sampled, (positions > length // 2).astype(int), -1),
        "policy_version": np.where(sampled, rng.integers(3, 5), -1),
        "temperature": np.where(sampled, 0.7, 1.0),
    }


def lay_out(sequences: MadeUp, rows: Sequence[Sequence[int]], *, spare: int = 0) -> PolicyBatch:
    """The sequences in rows (numbers of the sequences of each row, in order), `spare` columns and rows of padding."""
    width = spare + max(sum(len(sequences[n]["logprobs"]) for n in row) for row in rows)
    arrays: dict[str, Any] = {}
    for name, first in sequences[0].items():
        arrays[name] = np.full((len(rows) + spare, width), _PADDING.get(name, 0), first.dtype)
    arrays["segment_ids"] = np.zeros((len(rows) + spare, width), np.int32)
    for number, columns, row, segment in places(sequences, rows):
        arrays["segment_ids"][row, columns] = segment
        for name, value in sequences[number].items():
            arrays[name][row, columns] = value
    return PolicyBatch(**{n: _device(n, a) for n, a in arrays.items()})


def places(sequences: MadeUp, rows: Sequence[Sequence[int]]) -> list[tuple[int, slice, int, int]]:
    """(sequence, its columns, its row, its segment id) of all sequences."""
    found = []
    for row, members in enumerate(rows):
        start = 0
        for segment, number in enumerate(members, 1):
            end = start + len(sequences[number]["logprobs"])
            found.append((number, slice(start, end), row, segment))
            start = end
    return found


def gather(array: Any, sequences: MadeUp, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Values of the tokens of an array in that layout, sequence after sequence in the order of their numbers."""
    found = sorted(places(sequences, rows), key=lambda place: place[0])
    return np.concatenate([np.asarray(array)[row, columns] for _, columns, row, _ in found])


def _device(name: str, array: np.ndarray) -> Any:
    if name == "loss_mask":
        return jnp.asarray(array, bool)
    return jnp.asarray(array, jnp.int32) if name in INTEGERS else jnp.asarray(array)
