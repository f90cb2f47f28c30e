"""The fixed set of batch shapes, and which trajectory goes into which row of one of them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Buckets:
    """The shapes that a run may use.

    Args:
        shapes: allowed (micro, rows, width): micro-batches of `rows` rows of `width` tokens.
        attention_width: in a row of this width attention costs as much as everything else (tokens; about six times
            the hidden size). Wide rows pad less but attend more; this weighs one against the other.
    """

    shapes: tuple[Shape, ...]
    attention_width: float = 4096.0

    def __post_init__(self) -> None:
        if not self.shapes or any(len(shape) != 3 or min(shape) < 1 for shape in self.shapes):
            raise ValueError(f"buckets need at least one (micro, rows, width) of positive sizes, got {self.shapes}")

    @property
    def widest(self) -> int:
        """Tokens of the longest trajectory that fits."""
        return max(width for _, _, width in self.shapes)

    def cost(self, shape: Shape) -> float:
        """Relative cost of one update with so many micro-batches that hold something."""
        return float(np.prod(shape)) * (1.0 + shape[2] / self.attention_width)


def make_buckets(
    *,
    widths: Sequence[int],
    micro_tokens: int,
    max_tokens: int,
    row_multiple: int = 1,
    attention_width: float = 4096.0,
) -> Buckets:
    """Buckets for batches of up to `max_tokens` cells, in micro-batches of up to `micro_tokens` cells.

    Per width the sizes are 1, 2, 3, 4, 6, 8, 12, ...: in rows while these fit one micro-batch, then in full
    micro-batches. A batch gets at most 1.5 times the rows it needs (the smallest sizes: twice).

    Args:
        widths: allowed row widths (tokens); a trajectory must fit the largest.
        micro_tokens: cells of one forward pass; what memory allows.
        max_tokens: cells of the largest batch, its padding included.
        row_multiple: rows are a multiple of this (the mesh's data x fsdp).
        attention_width: see `Buckets`.
    """
    if min(*widths, micro_tokens, max_tokens, row_multiple) < 1:
        raise ValueError(f"sizes must be >= 1: {widths=}, {micro_tokens=}, {max_tokens=}, {row_multiple=}")
    shapes: list[Shape] = []
    for width in sorted(set(widths)):
        full = max(micro_tokens // (width * row_multiple), 1)
        micros = -(-max_tokens // (width * row_multiple * full))
        rows = [size for size in _sizes(full) if size < full] + [full]
        shapes += [(1, count * row_multiple, width) for count in rows]
        shapes += [(micro, full * row_multiple, width) for micro in _sizes(micros)[1:]]
    return Buckets(tuple(shapes), attention_width)


class Placement(NamedTuple):
    """Row (counted through all micro-batches) and first column of each trajectory, in a batch of this shape."""

    shape: Shape
    row: Int[np.ndarray, " sequence"]
    offset: Int[np.ndarray, " sequence"]


def place(
    parts: Sequence[Int[np.ndarray, " sequence"]], buckets: Buckets, *, one_per_row: bool = False
) -> list[Placement]:
    """Places the trajectories of each part (given by their lengths) in the cheapest shape that holds every part.

    Micro-batches that stay empty cost nothing.

    Raises:
        ValueError: no shape does.
    """
    fits: dict[int, list[tuple[np.ndarray, np.ndarray, int]]] = {}
    fit = _one_each if one_per_row else _best_fit
    best: tuple[tuple[float, int], Shape] | None = None
    for shape in buckets.shapes:
        micro, rows, width = shape
        if any(lengths.max(initial=0) > width or lengths.sum() > micro * rows * width for lengths in parts):
            continue
        if width not in fits:
            fits[width] = [fit(lengths, width) for lengths in parts]
        used = max(used for _, _, used in fits[width])
        if used <= micro * rows:
            price = buckets.cost((-(-used // rows), rows, width)), micro  # empty micro-batches are skipped
            best = min(best or (price, shape), (price, shape))
    if best is not None:
        return [Placement(best[1], row, offset) for row, offset, _ in fits[best[1][2]]]
    largest = max(buckets.shapes, key=lambda shape: int(np.prod(shape)))
    sizes = ", ".join(f"{len(lengths)} trajectories of {lengths.sum()} tokens" for lengths in parts)
    raise ValueError(
        f"{sizes} do not fit any allowed shape; the largest is {largest} (micro, rows, width): allow more "
        "micro-batches or make more mini-batches of the step"
    )


def _one_each(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, int]:
    return np.arange(len(lengths)), np.zeros(len(lengths), np.int64), len(lengths)


def _best_fit(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Best-fit decreasing: longest first, each into the fullest row that still has room.

    `spaces` holds `free * n + row`, ascending, so that one bisection finds that row.
    """
    n = len(lengths)
    row, offset = np.zeros(n, np.int64), np.zeros(n, np.int64)
    spaces: list[int] = []
    used = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        fullest = bisect.bisect_left(spaces, length * n)
        if fullest == len(spaces):
            free, target, used = width, used, used + 1
        else:
            free, target = divmod(spaces.pop(fullest), n)
        row[index], offset[index] = target, width - free
        if free > length:
            bisect.insort(spaces, (free - length) * n + target)
    return row, offset, used


def _sizes(least: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to the first that is >= least."""
    sizes, power = [1], 2
    while sizes[-1] < least:
        sizes += [power, power * 3 // 2]
        power *= 2
    return [size for size in sizes if size < least] + [next(size for size in sizes if size >= least)]
