"""What the learner benchmarks train on, the same for every side; standard library only, for the peers' environments."""

from __future__ import annotations

import math
from dataclasses import dataclass

FULL = (8, 512)
VARIABLE = (32, 1024, 10_228)


@dataclass(frozen=True)
class Case:
    """Sequences of one update.

    Args:
        lengths: tokens of each, prompt included.
        width: longest sequence; what a trainer without packing pads all of them to.
        how: how the lengths were made.
    """

    lengths: tuple[int, ...]
    width: int
    how: str

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(self.lengths)

    @property
    def prompts(self) -> tuple[int, ...]:
        """Tokens of each prompt: an eighth of its sequence."""
        return tuple(max(length // 8, 1) for length in self.lengths)

    def ids(self, number: int, vocab: int) -> list[int]:
        """Ids of a sequence: pseudo-random, so that no side profits from repetition."""
        state, ids = number * 2_654_435_761 + 12_345, []
        for _ in range(self.lengths[number]):
            state = (state * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64
            ids.append(10 + (state >> 33) % (vocab - 10))
        return ids

    def advantage(self, number: int) -> float:
        """Plus and minus one in turn: no sequence is without gradient."""
        return 1.0 if number % 2 == 0 else -1.0


def make_case(name: str, tokens: int | None = None) -> Case:
    """`full`: 8 sequences of 512. `variable`: 32 sequences, the longest 1,024, 10,228 tokens in all.

    Args:
        tokens: scales the case to this many tokens in all (about, for `full`).
    """
    if name == "full":
        count, width = FULL
        width = width if tokens is None else max(tokens // count, 2)
        return Case((width,) * count, width, "all of full length")
    count, width, total = VARIABLE
    if tokens is not None:
        if tokens < 16 * count:
            raise ValueError(f"the variable case has {count} sequences: give it at least {16 * count} tokens")
        width, total = tokens * width // total, tokens
    how = "quantiles (i + 1/2) / n of an exponential distribution, scaled to the sum, cut at the longest"
    return Case(variable_lengths(count, width, total), width, how)


def variable_lengths(count: int, longest: int, total: int) -> tuple[int, ...]:
    """`count` ascending lengths of sum `total`: exponential quantiles, scaled, cut at `longest`; one is `longest`."""
    quantiles = [-math.log1p(-(i + 0.5) / count) for i in range(count - 1)]
    low, high = 0.0, longest / quantiles[0]
    for _ in range(60):  # the sum of the lengths grows with the scale
        scale = (low + high) / 2
        lengths = [*(min(max(round(scale * q), 2), longest) for q in quantiles), longest]
        low, high = (scale, high) if sum(lengths) < total else (low, scale)
    rest, place = total - sum(lengths), count - 1
    while rest:  # what rounding left, one token each to the longest that can take it
        place = place - 1 if place else count - 1
        if 2 <= lengths[place] + (step := 1 if rest > 0 else -1) <= longest:
            lengths[place] += step
            rest -= step
    return tuple(sorted(lengths))
