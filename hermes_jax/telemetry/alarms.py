"""Figures and warnings about rewards over many steps: pure functions of counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRewards:
    """What one training step's rewards looked like.

    Args:
        groups, groups_constant: number of groups, and of those whose valid rewards were all equal.
        rewards, reward_missing: number of episodes, and of those without a valid reward.
        failures: failed calls by name of the reward function (verifier).
    """

    groups: int
    groups_constant: int
    rewards: int
    reward_missing: int
    failures: Mapping[str, int] = field(default_factory=dict)


def accuracies(correct: int, wrong: int, failed: int) -> dict[str, float]:
    """Share of solved tasks over all episodes and over those that came to an end; NaN where there are none.

    `failed` episodes (errors, timeouts, no verdict) stay in the first denominator: an engine that loses its hard
    episodes would look better otherwise.
    """
    return {
        "accuracy_over_all": _ratio(correct, correct + wrong + failed),
        "accuracy_over_completed": _ratio(correct, correct + wrong),
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def reward_alarms(history: Sequence[StepRewards], steps: int = 10) -> list[str]:
    """Warnings due after the last step of `history`; each comes back every `steps` steps while its cause lasts."""
    alarms = (constant_groups_alarm(history, steps), missing_rewards_alarm(history, steps))
    return [alarm for alarm in alarms if alarm is not None]


def constant_groups_alarm(history: Sequence[StepRewards], steps: int = 10) -> str | None:
    """Says that no group of the last `steps` steps had unequal rewards, i.e. that nothing was learned."""
    streak = _streak(history, lambda step: 0 < step.groups == step.groups_constant)
    if not streak or streak % steps:
        return None
    return (
        f"groups_constant: for {streak} steps every group had equal rewards (last step: {history[-1].groups} groups), "
        "so every advantage was 0 and nothing was learned. Likely causes: the tasks are too easy or too hard for this "
        "policy (see the mean reward); the reward function returns a constant; the sampling temperature is too low, or "
        "group_size too small, for the answers to differ."
    )


def missing_rewards_alarm(history: Sequence[StepRewards], steps: int = 10) -> str | None:
    """Says that half or more of the rewards of the last `steps` steps each were missing, and which verifier fails."""
    streak = _streak(history, lambda step: step.rewards > 0 and 2 * step.reward_missing >= step.rewards)
    if not streak or streak % steps:
        return None
    failures: Counter[str] = Counter()
    for step in history[-streak:]:
        failures.update(step.failures)
    worst = ", ".join(f"{name!r} ({number} failed calls)" for name, number in failures.most_common(3) if number)
    cause = (
        f"failing verifier: {worst}; its errors are in the log" if worst else "no verifier failed: they returned None"
    )
    last = history[-1]
    return (
        f"reward_missing: for {streak} steps half or more of the rewards were missing (last step: "
        f"{last.reward_missing} of {last.rewards}); {cause}. Episodes without a reward teach nothing."
    )


def _streak(history: Sequence[StepRewards], holds: Callable[[StepRewards], bool]) -> int:
    """Number of steps at the end of `history` for which `holds`."""
    length = 0
    for step in reversed(history):
        if not holds(step):
            break
        length += 1
    return length
