"""From episodes to the packed batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from hermes_jax.assembly import Policy, expected_sequences, packing_buckets, training_buckets
from hermes_jax.config import Config, ConfigError
from hermes_jax.data.packing import Layout, PackedBatch, pack, pack_parts, split_by_group
from hermes_jax.data.trajectory import Episode, Group, Outcome
from hermes_jax.learner.signal import Overlong, Signal, imitation_signal, make_signal
from hermes_jax.objectives import kl_on_host


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches for the updates of one pass, and what they were made of.

    Args:
        batches: one per mini-batch; none if no episode carries loss.
        signal: advantages and loss masks.
        metrics: under their documented names.
        parts: which of the signal's sequences each mini-batch holds, and where.
    """

    batches: list[PackedBatch]
    signal: Signal
    metrics: dict[str, float]
    parts: tuple[tuple[Sequence[int], Layout], ...] = ()


def training_batches(groups: Sequence[Group], config: Config, policy: Policy, mesh: Mesh) -> Batches:
    """Advantages of the groups, their trajectories in mini-batches that split no group, packed into one shape.

    With `grpo.kl_in: reward` the advantages are preliminary, and all episodes that count in a group's statistics are in
    the batches: `kl_in_rewards` makes them what is trained on.

    Raises:
        ConfigError: `learner.max_tokens` leaves no room for them.
    """
    grpo = config.grpo
    signal = group_signal(groups, config, with_masked=has_kl_in_rewards(config))
    sequences = signal.sequences
    if not any(signal.trained):
        return Batches([], signal, {"batch/trained_tokens": 0})
    parts = split_by_group(sequences, min(grpo.mini_batches, len({s.group for s in sequences})))
    expected = expected_sequences(config)
    most = -(-max(len(part) for part in parts) // expected) * expected  # templates may make several of an episode
    buckets = training_buckets(config, policy, mesh, most)
    try:
        packed = pack_parts([[sequences[n] for n in part] for part in parts], buckets)
    except ValueError as error:
        raise ConfigError(f"learner.max_tokens ({config.learner.max_tokens}) is too small: {error}") from error
    tokens = sum(int(layout.length.sum()) for _, layout in packed)
    cells = sum(batch.segment_ids.any(axis=(1, 2)).sum() * batch.segment_ids[0].size for batch, _ in packed)
    metrics = {
        "batch/padding_share": 1 - tokens / cells,
        "batch/tokens": tokens,
        "batch/trained_tokens": sum(
            s.trajectory.n_sampled for s, trained in zip(sequences, signal.trained, strict=True) if trained
        ),
    }
    places = tuple((part.tolist(), layout) for part, (_, layout) in zip(parts, packed, strict=True))
    return Batches([batch for batch, _ in packed], signal, metrics, places)


def group_signal(groups: Sequence[Group], config: Config, **options: Any) -> Signal:
    """`make_signal` with what the config says."""
    grpo = config.grpo
    if grpo.advantage == "gdpo" and not any(episode.reward_parts for group in groups for episode in group.episodes):
        raise ConfigError(
            f"grpo.advantage is gdpo, but no reward of environment {config.env.name} has named parts (Reward.parts); "
            "name them there, or choose another grpo.advantage"
        )
    return make_signal(
        groups,
        method=grpo.advantage,
        outcome_policy={outcome: getattr(grpo.outcome_policy, outcome) for outcome in Outcome},
        penalised_reward=grpo.penalised_reward,
        overlong=_overlong(config),
        pass_k=grpo.pass_k,
        **options,
    )


def has_kl_in_rewards(config: Config) -> bool:
    """Whether `kl_in_rewards` has anything to do."""
    return config.grpo.beta > 0 and config.grpo.kl_in == "reward"


def kl_in_rewards(
    packed: Batches, scored: Sequence[PackedBatch], groups: Sequence[Group], config: Config
) -> tuple[Batches, list[PackedBatch]]:
    """Takes `beta * sum of the KL estimates of its tokens` off each episode's reward; advantages follow from that.

    Args:
        packed: of `training_batches` for these groups.
        scored: its batches with old and reference log-probs.

    Returns:
        `packed` with the signal after it, and the scored batches with its advantages and loss masks.
    """
    grpo, before = config.grpo, packed.signal
    penalties = np.zeros(len(before.advantages))
    for (part, layout), batch in zip(packed.parts, scored, strict=True):
        log_ratio = np.where(batch.loss_mask, batch.old_logprobs - batch.ref_logprobs, 0.0)
        for number, values in zip(part, layout.gather(log_ratio), strict=True):
            penalties[before.episode_of[number]] += grpo.beta * kl_on_host(values, kind=grpo.kl_kind).sum()
    signal = group_signal(groups, config, with_masked=True, kl_penalties=penalties)
    # Whether a group's rewards are equal is said of the rewards as the environment gave them.
    signal = replace(signal, groups_constant=before.groups_constant, groups_too_few=before.groups_too_few)
    metrics = packed.metrics | {"train/kl_penalty": float(penalties[sorted(set(before.episode_of))].mean())}
    batches = [_with_signal(b, signal, *place) for b, place in zip(scored, packed.parts, strict=True)]
    return replace(packed, signal=signal, metrics=metrics), batches


def _with_signal(batch: PackedBatch, signal: Signal, part: Sequence[int], layout: Layout) -> PackedBatch:
    """A batch with the advantages of `signal`, and without the tokens of sequences that carry no loss."""
    lengths = [int(length) for length in layout.length]
    advantages = [np.full(n, signal.sequences[at].advantage, np.float32) for at, n in zip(part, lengths, strict=True)]
    trained = layout.scatter([np.full(n, signal.trained[at]) for at, n in zip(part, lengths, strict=True)], fill=False)
    return batch._replace(advantages=layout.scatter(advantages), loss_mask=batch.loss_mask & trained)


def _overlong(config: Config) -> Overlong | None:
    """The soft punishment, if the config has one; it sees to it that there is a limit."""
    limit, grpo = config.env.max_episode_tokens, config.grpo
    if limit is None or grpo.overlong_cache is None:
        return None
    return Overlong(limit, grpo.overlong_cache, grpo.overlong_penalty)


def imitation_batch(
    episodes: Sequence[Episode], config: Config, policy: Policy, mesh: Mesh
) -> tuple[PackedBatch, float]:
    """Scripted episodes as one batch with advantage 1, and the share of its cells that hold no token.

    Raises:
        ConfigError: there are none, or one is longer than `model.context_length`.
    """
    sequences = imitation_signal(episodes)
    if not sequences:
        raise ConfigError(
            f"warm_start.steps is {config.warm_start.steps}, but environment {config.env.name} has no scripted "
            "episodes (Environment.demonstrate); set warm_start.steps to 0"
        )
    longest = max(len(sequence.trajectory) for sequence in sequences)
    if longest > config.model.context_length:
        raise ConfigError(
            f"a scripted episode of the warm start has {longest} tokens; raise model.context_length "
            f"({config.model.context_length})"
        )
    batch, layout = pack(sequences, packing_buckets(config, policy, mesh, len(sequences)))
    return batch, layout.padding_share
