"""Episodes that failed through no fault of the policy: said once, and the end of a run if no other kind is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hermes_jax.data.trajectory import Episode, Outcome

FAILED = (Outcome.ERROR, Outcome.ENV_ERROR, Outcome.VERIFIER_ERROR, Outcome.ABORTED)
"""Outcomes that say nothing about the policy."""


class NothingPlayed(RuntimeError):
    """No episode of a collection can be used: the set-up is broken, and to go on would only hide it."""


class FailureNotes:
    """Remembers which kinds of failure were reported."""

    def __init__(self) -> None:
        self._known: set[Outcome] = set()

    def new(self, episodes: Sequence[Episode]) -> list[str]:
        """One line per outcome that failed for the first time."""
        lines = []
        for outcome in FAILED:
            failed = [e for e in episodes if e.outcome is outcome]
            if failed and outcome not in self._known:
                self._known.add(outcome)
                lines.append(f"{len(failed)} of {len(episodes)} episodes: {outcome}; the first: {failed[0].error}")
        return lines


def require_some(episodes: Sequence[Episode], where: str, *, rewards: bool) -> None:
    """Raises NothingPlayed if every episode failed, or (`rewards`) none has a reward.

    Args:
        where: names the collection ("step 3").
    """
    failed = [e for e in episodes if e.outcome in FAILED]
    if len(failed) < len(episodes) and (not rewards or any(e.reward is not None for e in episodes)):
        return
    kinds = Counter(str(e.outcome) for e in failed)
    without = sum(e.reward is None and e.outcome not in FAILED for e in episodes)
    parts = [f"{count} {kind}" for kind, count in kinds.most_common()]
    if without:
        parts.append(f"{without} with the reward None (the reward function had no opinion)")
    first = f"; the first: {failed[0].error}" if failed else ""
    raise NothingPlayed(f"no episode of {where} can be used: of {len(episodes)}, {', '.join(parts)}{first}")
