"""Advantages from the outcome rewards of groups: on the host, in numpy float64, vectorised over groups.

| method | advantage | source |
|---|---|---|
| `group_mean_std` | `(R - mean_g) / (std_g + eps)` | GRPO, arXiv:2402.03300 |
| `group_mean` | `R - mean_g` | Dr. GRPO, arXiv:2503.20783 |
| `leave_one_out` | `R - mean of the others = n / (n - 1) (R - mean_g)` | RLOO, arXiv:2402.14740 |
| `group_mean_batch_std` | `(R - mean_g) / (std of R over the batch + eps)` | arXiv:2508.08221 |
| `batch_norm` | `(R - mean) / sqrt(var + whiten_eps)` over the batch | REINFORCE++, arXiv:2501.03262 |
| `group_mean_batch_norm` | the same, applied to `R - mean_g` | REINFORCE++-baseline, arXiv:2501.03262 |
| `gdpo_advantages` | `group_mean_std` of each part of the reward, their sum as in `batch_norm` | arXiv:2601.05242 |
| `pass_at_k_advantages` | by how much a member raises the best of `k` | arXiv:2508.10751 |

A missing reward (None, NaN, infinite) is no 0: it is left out of every statistic and its own advantage is 0. A group
with fewer than two valid rewards, or with equal ones (`max - min <= 1e-6 max(1, |max|)`: rounding noise is no signal),
gets exactly 0. Two exceptions follow from their formulas: `batch_norm` does not look at groups, and in
`group_mean_batch_norm` such a group takes part with value 0 and is then shifted by the batch mean like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

ADVANTAGE_METHODS = (
    "group_mean_std",
    "group_mean",
    "leave_one_out",
    "group_mean_batch_std",
    "batch_norm",
    "group_mean_batch_norm",
)
WEIGHTINGS = ("sequence", "token")


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages in the order of the rewards, and what became of each group (ordered by ascending group id)."""

    advantages: Float[np.ndarray, " episode"]
    valid: Bool[np.ndarray, " episode"]
    group_ids: np.ndarray
    group_index: Int[np.ndarray, " episode"]
    constant: Bool[np.ndarray, " group"]
    too_few: Bool[np.ndarray, " group"]

    @property
    def degenerate(self) -> Bool[np.ndarray, " group"]:
        """Groups that carry no signal: too few valid rewards, or equal ones."""
        return self.constant | self.too_few


def group_advantages(
    rewards: Sequence[float | None] | np.ndarray,
    group_ids: Sequence[Any] | np.ndarray,
    *,
    method: str = "group_mean_std",
    eps: float = 1e-6,
    ddof: int = 1,
    weighting: str = "sequence",
    whiten_eps: float = 1e-8,
    token_counts: Sequence[int] | np.ndarray | None = None,
) -> AdvantageResult:
    """Advantages of episodes within their groups (any sizes, any order).

    Args:
        rewards: one per episode; None, NaN or infinite = missing.
        group_ids: the group of each episode; numbers or strings.
        method: one of `ADVANTAGE_METHODS`.
        eps: added to a standard deviation.
        ddof: 0 or 1; divisor `n - ddof` of variances.
        weighting: of batch statistics: an episode counts once (`sequence`) or once per generated token (`token`).
        whiten_eps: added to a variance under the root.
        token_counts: generated tokens per episode; needed for `weighting="token"` only.

    Raises:
        ValueError: unknown method or weighting, lengths that differ, missing token counts.
    """
    values = _as_float64(rewards)
    _check(values, group_ids, method, ddof, weighting, token_counts)
    groups = _Groups.of(values, np.asarray(group_ids))
    weights = _weights(groups.valid, weighting, token_counts)
    advantages = np.where(groups.valid, _advantages(groups, method, eps, ddof, whiten_eps, weights), 0.0)
    return AdvantageResult(advantages, groups.valid, groups.ids, groups.index, groups.constant, groups.too_few)


def gdpo_advantages(
    parts: Mapping[str, Sequence[float | None] | np.ndarray],
    group_ids: Sequence[Any] | np.ndarray,
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    whiten_eps: float = 1e-8,
) -> AdvantageResult:
    """Each part of the reward normalised in its group, their sum normalised over the batch (GDPO, arXiv:2601.05242).

    Two members whose parts add up to the same reward in different ways get different advantages. A part that a member
    has not got counts nothing for it; a member without any part is missing. A group is constant if every part is.

    Args:
        parts: by name, one value per episode; None, NaN or infinite = missing.
        group_ids, eps, ddof, whiten_eps: as in `group_advantages`.

    Raises:
        ValueError: no parts, or lengths that differ.
    """
    if not parts:
        raise ValueError("gdpo normalises each part of the reward by itself, but the rewards have no parts")
    results = [group_advantages(values, group_ids, eps=eps, ddof=ddof) for values in parts.values()]
    valid = np.any([result.valid for result in results], axis=0)
    total = np.sum([result.advantages for result in results], axis=0)
    too_few = np.all([result.too_few for result in results], axis=0)
    degenerate = np.all([result.degenerate for result in results], axis=0)
    advantages = np.where(valid, _normalised(total, valid.astype(np.float64), ddof, whiten_eps), 0.0)
    return replace(results[0], advantages=advantages, valid=valid, constant=degenerate & ~too_few, too_few=too_few)


def pass_at_k_advantages(
    rewards: Sequence[float | None] | np.ndarray,
    group_ids: Sequence[Any] | np.ndarray,
    *,
    k: int,
    eps: float = 1e-6,
) -> AdvantageResult:
    """`(E[max of k, i among them] - E[max of k]) / (std of max of k + eps)` over all choices of k of the group.

    With rewards of 0 and 1 these are the analytical advantages of Pass@k training (arXiv:2508.10751); graded rewards
    are taken as they are. `k = 1` is `group_mean_std` with `ddof = 0`. A group with no more than `k` valid rewards has
    only one choice, and gets 0 (it counts as too few).

    Raises:
        ValueError: `k` below 1, or lengths that differ.
    """
    if k < 1:
        raise ValueError(f"k of pass@k must be at least 1, got {k}")
    values = _as_float64(rewards)
    _check(values, group_ids, "group_mean", 0, "sequence", None)
    groups = _Groups.of(values, np.asarray(group_ids))
    too_few = groups.too_few | (groups.count <= k)
    advantages = np.zeros(len(values))
    for size in sorted(set(groups.count[~too_few & ~groups.constant].tolist())):
        chosen = np.flatnonzero((groups.count == size) & ~too_few & ~groups.constant)
        found = np.flatnonzero(groups.valid & np.isin(groups.index, chosen))
        members = found[np.lexsort((groups.unit[found], groups.index[found]))].reshape(-1, size)
        advantages[members] = _best_of(groups.unit[members], size, k, eps / groups.half_span[chosen] / 2)
    constant = groups.constant & ~too_few
    return AdvantageResult(advantages, groups.valid, groups.ids, groups.index, constant, too_few)


def _best_of(ascending: np.ndarray, size: int, k: int, eps: np.ndarray) -> np.ndarray:
    overall, including = _choices(size, k)
    mean = ascending @ overall
    spread = np.sqrt(np.maximum((ascending - mean[:, None]) ** 2 @ overall, 0.0))
    return (ascending @ including.T - mean[:, None]) / (spread + eps)[:, None]


@lru_cache
def _choices(size: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Of all choices of k from members in ascending order: the share whose best is member j, `[j]`; and the same of the
    choices that include member i, `[i, j]`."""
    overall = np.array([math.comb(j, k - 1) / math.comb(size, k) for j in range(size)])
    including = np.zeros((size, size))
    for i in range(size):
        including[i, i] = math.comb(i, k - 1)
        for j in range(i + 1, size):
            including[i, j] = math.comb(j - 1, k - 2) if k > 1 else 0
    return overall, including / math.comb(size - 1, k - 1)


@dataclass(frozen=True)
class _Groups:
    """Rewards with the statistics of their groups; 0 stands for a missing reward."""

    rewards: np.ndarray
    valid: np.ndarray
    ids: np.ndarray
    index: np.ndarray
    count: np.ndarray
    constant: np.ndarray
    too_few: np.ndarray
    half_span: np.ndarray
    """Half of it, for the whole may overflow; 1 in degenerate groups."""
    unit: np.ndarray
    """`(R - mean_g) / span_g` per episode, so that squares of huge rewards stay finite; 0 in degenerate groups."""

    @staticmethod
    def of(values: np.ndarray, group_ids: np.ndarray) -> _Groups:
        valid = np.isfinite(values)
        rewards = np.where(valid, values, 0.0)
        ids, index = np.unique(group_ids, return_inverse=True)
        index = index.reshape(-1)
        count = np.bincount(index[valid], minlength=len(ids))
        low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
        np.minimum.at(low, index[valid], rewards[valid])
        np.maximum.at(high, index[valid], rewards[valid])
        too_few = count < 2
        low, high = np.where(too_few, 0.0, low), np.where(too_few, 0.0, high)
        constant = ~too_few & _equal(low, high)
        live = (valid & ~(constant | too_few)[index]).astype(np.float64)
        half_span = np.where(constant | too_few, 1.0, high / 2 - low / 2)
        place = live * (rewards / 2 - low[index] / 2) / half_span[index]
        mean = np.bincount(index, place, len(ids)) / np.maximum(count, 1)
        unit = live * (place - mean[index])
        return _Groups(rewards, valid, ids, index, count, constant, too_few, half_span, unit)

    def centred(self) -> np.ndarray:
        """`R - mean_g`, exactly 0 in degenerate groups."""
        return 2 * self.unit * self.half_span[self.index]

    def std(self, ddof: int) -> np.ndarray:
        """Standard deviation of each group, on its members."""
        squares = np.bincount(self.index, self.unit**2, len(self.ids))
        return (self.half_span * (2 * np.sqrt(squares / np.maximum(self.count - ddof, 1))))[self.index]


def _advantages(
    groups: _Groups, method: str, eps: float, ddof: int, whiten_eps: float, weights: np.ndarray
) -> np.ndarray:
    if method == "batch_norm":
        return _normalised(groups.rewards, weights, ddof, whiten_eps)
    centred = groups.centred()
    if method == "group_mean":
        return centred
    if method == "leave_one_out":
        return centred * (groups.count / np.maximum(groups.count - 1, 1))[groups.index]
    if method == "group_mean_std":
        return centred / (groups.std(ddof) + eps)
    if method == "group_mean_batch_std":
        return centred / (_std(groups.rewards, weights, ddof) + eps)
    return _normalised(centred, weights, ddof, whiten_eps)


def _normalised(values: np.ndarray, weights: np.ndarray, ddof: int, whiten_eps: float) -> np.ndarray:
    """`(x - mean) / sqrt(var + whiten_eps)` of the weighted batch; 0 if all its values are equal."""
    counted = values[weights > 0]
    if counted.size == 0 or _equal(counted.min(), counted.max()):
        return np.zeros_like(values)
    return (values - np.average(values, weights=weights)) / np.hypot(_std(values, weights, ddof), np.sqrt(whiten_eps))


def _std(values: np.ndarray, weights: np.ndarray, ddof: int) -> float:
    """Weighted standard deviation; 0 for fewer than two counts."""
    total = weights.sum()
    if total <= ddof or total == 0:
        return 0.0
    centred = np.where(weights > 0, values - np.average(values, weights=weights), 0.0)
    scale = np.abs(centred).max() or 1.0
    return float(scale * np.sqrt(np.sum(weights * (centred / scale) ** 2) / (total - ddof)))


def _equal(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return high / 2 - low / 2 <= 0.5e-6 * np.maximum(1.0, np.abs(high))


def _weights(valid: np.ndarray, weighting: str, token_counts: Sequence[int] | np.ndarray | None) -> np.ndarray:
    if weighting == "token":
        return valid * np.asarray(token_counts, np.float64)
    return valid.astype(np.float64)


def _as_float64(rewards: Sequence[float | None] | np.ndarray) -> np.ndarray:
    if isinstance(rewards, np.ndarray) and rewards.dtype != object:
        return rewards.astype(np.float64)
    return np.array([np.nan if reward is None else reward for reward in rewards], np.float64)


def _check(
    values: np.ndarray,
    group_ids: Sequence[Any] | np.ndarray,
    method: str,
    ddof: int,
    weighting: str,
    token_counts: Sequence[int] | np.ndarray | None,
) -> None:
    if method not in ADVANTAGE_METHODS:
        raise ValueError(f"unknown advantage method {method!r}; choose one of {', '.join(ADVANTAGE_METHODS)}")
    if weighting not in WEIGHTINGS:
        raise ValueError(f"unknown weighting {weighting!r}; choose one of {', '.join(WEIGHTINGS)}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof}")
    if values.ndim != 1 or len(values) != len(group_ids):
        raise ValueError(f"need one reward and one group id per episode, got {values.shape} and {len(group_ids)} ids")
    if weighting == "token" and (token_counts is None or len(token_counts) != len(values)):
        got = "none" if token_counts is None else str(len(token_counts))
        raise ValueError(f"weighting 'token' needs the token count of each of the {len(values)} episodes, got {got}")
