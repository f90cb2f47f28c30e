"""From scored groups to training sequences: whose reward counts, what its advantage is, which tokens carry loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hermes_jax.data.packing import TrainingSequence
from hermes_jax.data.trajectory import Episode, Group, Outcome
from hermes_jax.objectives import (
    AdvantageResult,
    gdpo_advantages,
    group_advantages,
    pass_at_k_advantages,
    soft_overlong_penalty,
)


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft punishment of episodes that near their limit of sampled tokens.

    Args:
        max_tokens: the limit.
        cache: so many tokens before it the punishment begins.
        penalty: reward lost at the limit.
    """

    max_tokens: int
    cache: int
    penalty: float = 1.0

    def __call__(self, episode: Episode) -> float:
        """What is added to the episode's reward; never above 0."""
        lengths = [episode.n_sampled]
        penalty = soft_overlong_penalty(lengths, max_len=self.max_tokens, cache=self.cache, factor=self.penalty)
        return float(penalty[0])


@dataclass(frozen=True, eq=False)
class Signal:
    """What a step trains on, and what became of its groups.

    Args:
        sequences: one per trajectory that carries loss (or is needed for the KL in its group's rewards).
        episode_of: the episode of each sequence, counted through the groups.
        trained: whether each sequence carries loss.
        groups_constant: groups without signal because all valid rewards are equal.
        groups_too_few: groups with fewer than two valid rewards.
        degenerate: of each group, whether it is one of these.
        advantages: one per episode, in the order of the groups.
    """

    sequences: list[TrainingSequence]
    episode_of: list[int]
    trained: list[bool]
    groups_constant: int
    groups_too_few: int
    degenerate: np.ndarray
    advantages: np.ndarray


def make_signal(
    groups: Sequence[Group],
    *,
    method: str,
    outcome_policy: Mapping[Outcome, str],
    penalised_reward: float,
    overlong: Overlong | None = None,
    pass_k: int = 1,
    with_masked: bool = False,
    kl_penalties: Sequence[float] | np.ndarray | None = None,
) -> Signal:
    """Advantages per episode within its group, and the loss mask of each trajectory.

    `loss_mask = mask ∧ valid reward ∧ outcome policy`. Outcomes: `keep` trains; `mask` counts in its group's statistics
    and carries no loss; `penalise` replaces the reward by `penalised_reward`; `drop` is in neither.

    Args:
        groups: scored episodes.
        method: one of `objectives.ADVANTAGE_METHODS`, `gdpo` or `pass_at_k`.
        outcome_policy: what each outcome does to training.
        penalised_reward: reward of penalised episodes.
        overlong: lowers the rewards of long episodes (not of penalised ones); None = off.
        pass_k: of `pass_at_k`, how many episodes the best is taken of.
        with_masked: give sequences of masked episodes, too; their loss mask is the same, `Signal.trained` says no.
        kl_penalties: what is taken off each episode's reward, in the order of the groups; None = nothing.
    """
    episodes = [(number, episode) for number, group in enumerate(groups) for episode in group.episodes]
    rewards = [_counted_reward(episode, outcome_policy, penalised_reward, overlong) for _, episode in episodes]
    if kl_penalties is not None:
        rewards = [r if r is None else r - float(kl) for r, kl in zip(rewards, kl_penalties, strict=True)]
    result = _advantages(episodes, rewards, method, pass_k)
    masked = [outcome_policy[episode.outcome] == "mask" for _, episode in episodes]
    found = [
        (sequence, at)
        for at, (number, episode) in enumerate(episodes)
        if result.valid[at] and (with_masked or not masked[at])
        for sequence in _sequences(episode, number, float(result.advantages[at]))
    ]
    return Signal(
        sequences=[sequence for sequence, _ in found],
        episode_of=[at for _, at in found],
        trained=[not masked[at] for _, at in found],
        groups_constant=int(result.constant.sum()),
        groups_too_few=int(result.too_few.sum()),
        degenerate=result.degenerate,
        advantages=result.advantages,
    )


def imitation_signal(episodes: Sequence[Episode]) -> list[TrainingSequence]:
    """Advantage 1 on every sampled token of scripted episodes: with `reinforce` the loss is their cross-entropy."""
    return [sequence for number, episode in enumerate(episodes) for sequence in _sequences(episode, number, 1.0)]


def _advantages(
    episodes: Sequence[tuple[int, Episode]], rewards: Sequence[float | None], method: str, pass_k: int
) -> AdvantageResult:
    groups = [number for number, _ in episodes]
    if method == "pass_at_k":
        return pass_at_k_advantages(rewards, groups, k=pass_k)
    if method != "gdpo":
        return group_advantages(rewards, groups, method=method)
    names = sorted({name for _, episode in episodes for name in episode.reward_parts})
    counted = [
        episode.reward_parts if reward is not None else {}
        for (_, episode), reward in zip(episodes, rewards, strict=True)
    ]
    return gdpo_advantages({name: [parts.get(name) for parts in counted] for name in names}, groups)


def _counted_reward(
    episode: Episode, policy: Mapping[Outcome, str], penalised: float, overlong: Overlong | None
) -> float | None:
    match policy[episode.outcome]:
        case "drop":
            return None
        case "penalise":
            return penalised
        case _:
            if episode.reward is None or overlong is None:
                return episode.reward
            return episode.reward + overlong(episode)


def _sequences(episode: Episode, group: int, advantage: float) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            trajectory, advantage, group=group, name=f"{episode.task_id}/member {episode.member}/trajectory {number}"
        )
        for number, trajectory in enumerate(episode.trajectories)
        if trajectory.n_sampled
    ]
