"""What a reward function may return, and how several rewards become one.

A reward is a finite real number. Everything else is a missing reward, never 0: None has no opinion, and NaN, an
exception, a timeout, a wrong type or a wrong number of values are failures.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any


@dataclass(frozen=True)
class RewardValue:
    """A reward or the lack of one.

    Args:
        value: the reward; None = missing.
        failure: why it is missing; None for a valid reward and for "no opinion".
        timed_out: the failure is a timeout.
    """

    value: float | None
    failure: str | None = None
    timed_out: bool = False


def normalise_reward(value: Any) -> RewardValue:
    """A returned value as a reward: any finite real number, bool, or one-element array; None is "no opinion"."""
    if value is None:
        return RewardValue(None)
    number = _single(value)
    if not isinstance(number, numbers.Real | Decimal):
        return _failure(f"{_shown(value)} is not a number")
    try:
        reward = float(number)
    except (ValueError, OverflowError) as error:
        return _failure(f"{_shown(value)} is not a finite number ({error})")
    return RewardValue(reward) if math.isfinite(reward) else _failure(f"{_shown(value)} is not finite")


def _single(value: Any) -> Any:
    """The element of a one-element array (numpy, jax, torch; known by its shape), anything else as it is."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and math.prod(shape) == 1 and callable(getattr(value, "item", None)):
        return value.item()
    return value


def _failure(what: str) -> RewardValue:
    return RewardValue(None, what)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def normalise_batch(values: Any, count: int) -> list[RewardValue]:
    """The values that a batch function returned for `count` samples; a wrong number of them fails all."""
    if isinstance(values, list | tuple | Iterator):
        elements = list(islice(values, count + 1))
        found = f"{len(elements)} values" if len(elements) <= count else f"more than {count} values"
    elif getattr(values, "shape", ()):
        elements, found = list(values), f"{len(values)} values"
    else:
        elements, found = [], f"{_shown(values)}, no list"
    if len(elements) == count and "no list" not in found:
        return [normalise_reward(element) for element in elements]
    return [_failure(f"returned {found} for {count} samples")] * count


def combine_rewards(parts: Mapping[str, RewardValue], weights: Mapping[str, float]) -> RewardValue:
    """Weighted sum of the parts that have an opinion; missing if none has, a failure if any of them failed.

    Parts of weight 0 are metrics: neither their values nor their failures count (0 times NaN is NaN).

    Raises:
        ValueError: a part without a weight.
    """
    unknown = sorted(set(parts) - set(weights))
    if unknown:
        raise ValueError(f"no weight for the reward part {unknown[0]!r}; weights: {sorted(weights)}")
    counting = {name: part for name, part in parts.items() if weights[name] != 0}
    failed = [f"{name}: {part.failure}" for name, part in counting.items() if part.failure is not None]
    if failed:
        return RewardValue(None, "; ".join(failed), any(part.timed_out for part in counting.values()))
    values = [weights[name] * part.value for name, part in counting.items() if part.value is not None]
    return normalise_reward(sum(values)) if values else RewardValue(None)
