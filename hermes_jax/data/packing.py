"""Packing: several trajectories per row, in shapes from a small fixed set, so that nothing recompiles after warm-up.

Shapes are `[micro, rows, width]`: the update scans over micro-batches; each is one forward pass of `rows` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from hermes_jax.data.buckets import Buckets, Shape, place
from hermes_jax.data.trajectory import Trajectory


class PackedBatch(NamedTuple):
    """The tokens of one optimizer update; every array is `[micro, rows, width]` (or one micro-batch: `[rows, width]`).

    A value of token t stands at t's own place: `rollout_logprobs[t]` = log p(tokens[t] | tokens before t).

    Fields:
        tokens: token ids, 0 in padding.
        segment_ids: number of the trajectory in its row, from 1; 0 = padding.
        positions: place in the trajectory, from 0; 0 in padding.
        loss_mask: True where the token is trained.
        advantages: advantage of the token, 0 in padding.
        rollout_logprobs, old_logprobs, ref_logprobs: log-probs (nats) under the behaviour policy, the policy at the
            start of the step, and the reference; 0 where unknown or padding.
        temperature: sampling temperature of the token, 1 where it was not sampled.
        turn, policy_version: number of the model's turn and version of the weights; -1 where it was not sampled.
    """

    tokens: Int[Any, "micro rows width"]
    segment_ids: Int[Any, "micro rows width"]
    positions: Int[Any, "micro rows width"]
    loss_mask: Bool[Any, "micro rows width"]
    advantages: Float[Any, "micro rows width"]
    rollout_logprobs: Float[Any, "micro rows width"]
    old_logprobs: Float[Any, "micro rows width"]
    ref_logprobs: Float[Any, "micro rows width"]
    temperature: Float[Any, "micro rows width"]
    turn: Int[Any, "micro rows width"]
    policy_version: Int[Any, "micro rows width"]


@dataclass(frozen=True, eq=False)
class TrainingSequence:
    """A trajectory and what the trainer decided about it.

    Args:
        trajectory: the tokens.
        advantage: one value for all tokens, or one per token.
        loss_mask: which tokens are trained; None = the trajectory's own mask. Never more than that mask.
        group: trajectories of one group stay in one mini-batch.
        name: names the trajectory in errors (`task/member/trajectory`).
    """

    trajectory: Trajectory
    advantage: float | Float[np.ndarray, " token"] = 0.0
    loss_mask: Bool[np.ndarray, " token"] | None = None
    group: int = 0
    name: str = ""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where each trajectory lies, in the order in which they were given.

    Args:
        shape: (micro, rows, width).
        row: row of each trajectory, counted through all micro-batches.
        offset: its first column.
        length: its tokens.
    """

    shape: Shape
    row: Int[np.ndarray, " sequence"]
    offset: Int[np.ndarray, " sequence"]
    length: Int[np.ndarray, " sequence"]

    @property
    def padding_share(self) -> float:
        """Share of the cells that hold no token."""
        return 1.0 - float(self.length.sum()) / float(np.prod(self.shape))

    def cells(self) -> Int[np.ndarray, " token"]:
        """Flat index into the `[micro, rows, width]` array of every token, trajectory after trajectory."""
        start = self.row.astype(np.int64) * self.shape[2] + self.offset
        return np.repeat(start, self.length) + _count_up(self.length)

    def scatter(self, values: Sequence[np.ndarray], *, fill: float = 0.0) -> np.ndarray:
        """Puts one array per trajectory (one value per token) into a `[micro, rows, width]` array."""
        for number, (value, length) in enumerate(zip(values, self.length, strict=True)):
            if len(value) != length:
                raise ValueError(f"trajectory {number} has {length} tokens but {len(value)} values to scatter")
        dtype = values[0].dtype if len(values) else np.float32
        return self._fill(np.concatenate(values) if len(values) else np.zeros(0, dtype), fill)

    def gather(self, array: Any) -> list[np.ndarray]:
        """The inverse of `scatter`: one array per trajectory out of a `[micro, rows, width]` array."""
        if array.shape != self.shape:
            raise ValueError(f"cannot gather from shape {array.shape}: the layout has {self.shape}")
        flat = np.asarray(array).reshape(-1)[self.cells()]
        return np.split(flat, np.cumsum(self.length)[:-1]) if self.length.size else []

    def _fill(self, flat: np.ndarray, fill: float = 0.0, cells: np.ndarray | None = None) -> np.ndarray:
        out = np.full(int(np.prod(self.shape)), fill, flat.dtype)
        out[self.cells() if cells is None else cells] = flat
        return out.reshape(self.shape)


def pack(
    sequences: Sequence[TrainingSequence], buckets: Buckets, *, one_per_row: bool = False
) -> tuple[PackedBatch, Layout]:
    """Packs trajectories into the cheapest allowed shape that holds them; rows left over are all padding.

    Args:
        sequences: what to train; may be empty.
        buckets: the allowed shapes.
        one_per_row: no packing: each trajectory has a row of its own.

    Returns:
        The batch (numpy) and the place of each trajectory.

    Raises:
        ValueError: a trajectory is longer than the widest row, or no allowed shape holds all of them.
    """
    [packed] = pack_parts([sequences], buckets, one_per_row=one_per_row)
    return packed


def pack_parts(
    parts: Sequence[Sequence[TrainingSequence]], buckets: Buckets, *, one_per_row: bool = False
) -> list[tuple[PackedBatch, Layout]]:
    """Packs several mini-batches into one common shape; see `pack`."""
    lengths = [np.array([len(s.trajectory) for s in part], np.int64) for part in parts]
    for part, length in zip(parts, lengths, strict=True):
        _check_lengths(part, length, buckets.widest)
    places = place(lengths, buckets, one_per_row=one_per_row)
    layouts = [Layout(*placed, length) for placed, length in zip(places, lengths, strict=True)]
    return [(_fill_batch(part, layout), layout) for part, layout in zip(parts, layouts, strict=True)]


def split_by_group(sequences: Sequence[TrainingSequence], parts: int) -> list[Int[np.ndarray, " sequence"]]:
    """Indices of the members of `parts` mini-batches of about equal token counts; no group is split.

    Raises:
        ValueError: there are fewer groups than parts.
    """
    groups = np.array([s.group for s in sequences], np.int64)
    names, inverse = np.unique(groups, return_inverse=True)
    if parts < 1 or len(names) < parts:
        raise ValueError(f"{len(names)} groups cannot make {parts} mini-batches: ask for fewer mini-batches")
    tokens = np.bincount(inverse, weights=[len(s.trajectory) for s in sequences])
    load, part_of = np.zeros(parts), np.zeros(len(names), np.int64)
    for group in np.argsort(-tokens, kind="stable"):
        part_of[group] = int(np.argmin(load))
        load[part_of[group]] += tokens[group]
    return [np.flatnonzero(part_of[inverse] == part) for part in range(parts)]


def _check_lengths(sequences: Sequence[TrainingSequence], lengths: np.ndarray, widest: int) -> None:
    if lengths.size and lengths.max() > widest:
        worst = int(lengths.argmax())
        raise ValueError(
            f"trajectory {worst} ({sequences[worst].name or 'unnamed'}) has {lengths[worst]} tokens, but the widest "
            f"row has {widest}: raise the largest packing width or lower the token limit of an episode"
        )


def _fill_batch(sequences: Sequence[TrainingSequence], layout: Layout) -> PackedBatch:
    cells = layout.cells()
    trajectories = [s.trajectory for s in sequences]

    def put(parts: Sequence[np.ndarray], dtype: Any, fill: float = 0.0) -> np.ndarray:
        flat = np.concatenate(parts).astype(dtype, copy=False) if len(parts) else np.zeros(0, dtype)
        return layout._fill(flat, fill, cells)

    return PackedBatch(
        tokens=put([t.tokens for t in trajectories], np.int32),
        segment_ids=put([np.repeat(_segments(layout), layout.length)], np.int32),
        positions=put([_count_up(layout.length)], np.int32),
        loss_mask=put([_loss_mask(s) for s in sequences], np.bool_),
        advantages=put(_advantages(sequences, layout.length), np.float32),
        rollout_logprobs=put([t.logprobs for t in trajectories], np.float32),
        old_logprobs=np.zeros(layout.shape, np.float32),
        ref_logprobs=np.zeros(layout.shape, np.float32),
        temperature=put([t.temperature for t in trajectories], np.float32, 1.0),
        turn=put([t.turn for t in trajectories], np.int32, -1),
        policy_version=put([t.policy_version for t in trajectories], np.int32, -1),
    )


def _segments(layout: Layout) -> Int[np.ndarray, " sequence"]:
    """Number of each trajectory in its row, from 1, by offset."""
    order = np.lexsort((layout.offset, layout.row))
    rows = layout.row[order]
    first = np.concatenate([[0], np.cumsum(np.bincount(rows))])[rows] if rows.size else rows
    segment = np.empty(len(order), np.int64)
    segment[order] = np.arange(len(order)) - first + 1
    return segment


def _loss_mask(sequence: TrainingSequence) -> np.ndarray:
    mask = sequence.trajectory.mask
    if sequence.loss_mask is None:
        return mask
    chosen = np.asarray(sequence.loss_mask, np.bool_)
    if chosen.shape != mask.shape:
        raise ValueError(f"loss mask of {sequence.name or 'a trajectory'} has shape {chosen.shape}, not {mask.shape}")
    if (chosen & ~mask).any():
        where = int(np.argmax(chosen & ~mask))
        raise ValueError(f"loss mask of {sequence.name or 'a trajectory'} trains token {where}, which was not sampled")
    return chosen


def _advantages(sequences: Sequence[TrainingSequence], lengths: np.ndarray) -> list[np.ndarray]:
    if all(np.ndim(s.advantage) == 0 for s in sequences):
        return [np.repeat(np.array([s.advantage for s in sequences], np.float32), lengths)]
    return [np.broadcast_to(np.asarray(s.advantage, np.float32), len(s.trajectory)) for s in sequences]


def _count_up(lengths: np.ndarray) -> np.ndarray:
    """0..length-1 for each length, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if lengths.size else 0) - np.repeat(ends - lengths, lengths)
