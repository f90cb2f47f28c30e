"""From episodes to the packed batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from hermes_jax.assembly import Policy, expected_sequences, packing_buckets, training_buckets
from hermes_jax.config import Config, ConfigError
from hermes_jax.data.packing import PackedBatch, pack, pack_parts, split_by_group
from hermes_jax.data.trajectory import Episode, Group, Outcome
from hermes_jax.learner.signal import Overlong, Signal, imitation_signal, make_signal


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches for the updates of one pass, and what they were made of.

    Args:
        batches: one per mini-batch; none if no episode carries loss.
        signal: advantages and loss masks.
        metrics: under their documented names.
    """

    batches: list[PackedBatch]
    signal: Signal
    metrics: dict[str, float]


def training_batches(groups: Sequence[Group], config: Config, policy: Policy, mesh: Mesh) -> Batches:
    """Advantages of the groups, their trajectories in mini-batches that split no group, packed into one shape.

    Raises:
        ConfigError: `learner.max_tokens` leaves no room for them.
    """
    grpo = config.grpo
    signal = make_signal(
        groups,
        method=grpo.advantage,
        outcome_policy={outcome: getattr(grpo.outcome_policy, outcome) for outcome in Outcome},
        penalised_reward=grpo.penalised_reward,
        overlong=_overlong(config),
    )
    sequences = signal.sequences
    if not sequences:
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
        "batch/trained_tokens": sum(int(batch.loss_mask.sum()) for batch, _ in packed),
    }
    return Batches([batch for batch, _ in packed], signal, metrics)


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
