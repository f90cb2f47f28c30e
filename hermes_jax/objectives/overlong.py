"""Answers that reach the length limit: a soft penalty, or leaving them out of the loss (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Bool, Float, Int


def soft_overlong_penalty(
    lengths: Sequence[int] | Int[np.ndarray, " sequence"], *, max_len: int, cache: int, factor: float = 1.0
) -> Float[np.ndarray, " sequence"]:
    """Penalty for answers that near the length limit (arXiv:2503.14476, eq. 13); on the host, in float64.

    0 up to `max_len - cache` generated tokens, then linear down to `-factor` at `max_len`, flat beyond.
    `cache == 0` is a hard step at `max_len`.

    Args:
        lengths: generated tokens per sequence (tokens, not characters).
        max_len, cache: in tokens; `0 <= cache <= max_len`, else ValueError.
        factor: the largest penalty, as a positive number.
    """
    if not 0 <= cache <= max_len:
        raise ValueError(f"cache must lie in [0, max_len={max_len}] tokens, got {cache}")
    excess = np.asarray(lengths, np.float64) - (max_len - cache)
    if cache == 0:
        return np.where(excess > 0, -factor, 0.0)
    return -factor * np.clip(excess / cache, 0.0, 1.0)


def drop_truncated(
    loss_mask: Bool[Array, "*rows width"], truncated: Bool[Array, "*rows width"]
) -> Bool[Array, "*rows width"]:
    """The loss mask without the tokens of truncated sequences (`truncated` is given on each token of its sequence).

    Rewards and group statistics are taken before this: a truncated answer stays a member of its group.
    """
    return loss_mask & ~truncated
