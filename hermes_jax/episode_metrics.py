"""Numbers about a step's episodes, under their documented names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hermes_jax.data.trajectory import Episode, Group, Outcome
from hermes_jax.telemetry.alarms import StepRewards

_TRUNCATED = (Outcome.LENGTH, Outcome.CONTEXT_FULL)


def train_metrics(groups: Sequence[Group]) -> dict[str, float | None]:
    """The `train/` metrics of a step's groups."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = _rewards(episodes)
    completed = [e for e in episodes if e.outcome is Outcome.COMPLETED]
    counters: Counter[str] = Counter()
    for episode in episodes:
        counters.update(episode.counters)
    outcomes = {str(outcome) for outcome in Outcome}
    return {
        "train/reward": _mean(rewards),
        "train/reward_std": float(np.std(rewards)) if rewards else None,
        "train/reward_min": min(rewards, default=None),
        "train/reward_max": max(rewards, default=None),
        "train/reward_missing": 1 - len(rewards) / len(episodes),
        "train/success": _success(episodes),
        "train/success_completed": _success(completed),
        "train/episodes": len(episodes),
        "train/response_tokens": _mean([e.n_sampled for e in episodes]),
        "train/response_tokens_max": max(e.n_sampled for e in episodes),
        "train/truncated": _mean([e.outcome in _TRUNCATED for e in episodes]),
        "train/turns": counters["turns"] / len(episodes),
        "train/trajectories": sum(len(e.trajectories) for e in episodes),
        **{f"train/outcome/{name}": share for name, share in _outcomes(episodes).items()},
        **{f"train/reward_part/{name}": value for name, value in _parts(episodes).items()},
        **{f"train/counter/{k}": n / len(episodes) for k, n in sorted(counters.items()) if k not in outcomes},
    }


def eval_metrics(sampled: Sequence[Episode], greedy: Sequence[Episode], seconds: float) -> dict[str, float | None]:
    """The `eval/` metrics of held-out episodes."""
    both = [*sampled, *greedy]
    return {
        "eval/success": _success(sampled),
        "eval/success_greedy": _success(greedy),
        "eval/success_completed": _success([e for e in sampled if e.outcome is Outcome.COMPLETED]),
        "eval/reward": _mean(_rewards(sampled)),
        "eval/reward_greedy": _mean(_rewards(greedy)),
        "eval/reward_missing": 1 - len(_rewards(both)) / len(both),
        "eval/episodes": len(both),
        "eval/response_tokens": _mean([e.counters.get("sampled_tokens", 0) for e in sampled]),
        "eval/seconds": seconds,
        **{f"eval/outcome/{name}": share for name, share in _outcomes(both).items()},
        **{f"eval/reward_part/{name}": value for name, value in _parts(sampled).items()},
    }


def step_rewards(groups: Sequence[Group], constant: int) -> StepRewards:
    """What the alarms need to know of a step."""
    episodes = [episode for group in groups for episode in group.episodes]
    failed = Counter({"compute_reward": sum(e.counters.get("verifier_errors", 0) for e in episodes)})
    return StepRewards(len(groups), constant, len(episodes), sum(e.reward is None for e in episodes), +failed)


def _rewards(episodes: Iterable[Episode]) -> list[float]:
    return [e.reward for e in episodes if e.reward is not None]


def _success(episodes: Sequence[Episode]) -> float | None:
    """Share that solved the task; an episode without a verdict solved nothing. None if no verdict is ever given."""
    if all(e.success is None for e in episodes):
        return None
    return _mean([e.success is True for e in episodes])


def _outcomes(episodes: Sequence[Episode]) -> Mapping[str, float]:
    counts = Counter(str(e.outcome) for e in episodes)
    return {name: count / len(episodes) for name, count in sorted(counts.items())}


def _parts(episodes: Sequence[Episode]) -> Mapping[str, float | None]:
    names = sorted({name for e in episodes for name in e.reward_parts})
    return {name: _mean([value for e in episodes if (value := e.reward_parts.get(name)) is not None]) for name in names}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
