"""Recorded rollouts again: the saved episodes of a run's step, as the batch of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from hermes_jax.assembly import Policy, open_mesh
from hermes_jax.batches import has_kl_in_rewards, kl_in_rewards, training_batches
from hermes_jax.config import Config, ConfigError
from hermes_jax.data.packing import Layout, PackedBatch
from hermes_jax.data.trajectory import Episode, Group, Outcome, Trajectory
from hermes_jax.learner.checkpoint import Checkpoints
from hermes_jax.learning import Learning
from hermes_jax.saved_policy import SavedPolicy, config_of, find_policy, open_saved, read_params, source_folder
from hermes_jax.telemetry.episodes import load_episodes

ONE_BATCH = "grpo.mini_batches=1"


@dataclass(frozen=True, eq=False)
class Scored:
    """The episodes as a batch, scored by the parameters.

    Args:
        batch: with `old` and reference log-probs.
        logprobs, entropy: under the parameters.
        order, layout: places of the trajectories, and the order in which they were recorded.
    """

    batch: PackedBatch
    logprobs: np.ndarray
    entropy: np.ndarray
    order: np.ndarray
    layout: Layout

    def trained(self, array: np.ndarray) -> np.ndarray:
        """The values of an array of the batch at the trained tokens, in the order in which these were recorded."""
        values, masks = self.layout.gather(array), self.layout.gather(self.batch.loss_mask)
        return np.concatenate([values[n][masks[n]] for n in self.order])


@dataclass(frozen=True, eq=False)
class Replay:
    """Episodes of one step and the parameters under which they are looked at again.

    Args:
        saved, policy, mesh: the run and its model.
        params, params_step: the parameters, and the checkpoint that they are from (0 = the start).
        step, groups: the episodes.
    """

    saved: SavedPolicy
    policy: Policy
    mesh: Mesh
    params: Any
    params_step: int
    step: int
    groups: list[Group]

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """The run's config under overrides, with all episodes in one batch."""
        return config_of(self.saved, [], [*overrides, ONE_BATCH])

    def learning(self, config: Config) -> Learning:
        """Scorer of this policy."""
        return Learning(config, self.policy, self.mesh)

    def reference(self, learning: Learning) -> Any:
        """Parameters of the reference: the policy at the run's first step."""
        return learning.load(start_folder(self.saved, learning.config))

    def scored(self, config: Config, learning: Learning, reference: Any) -> Scored:
        """All episodes as one batch, with advantages by this config.

        `old` log-probs are those recorded when the tokens were sampled.

        Raises:
            ConfigError: none of them carries loss.
        """
        packed = training_batches(self.groups, config, self.policy, self.mesh)
        if not packed.batches:
            raise ConfigError("none of these episodes carries loss (grpo.outcome_policy): choose another --step")
        [batch], [(part, layout)] = packed.batches, packed.parts
        now, entropy = learning.score(self.params, batch)
        ref, _ = learning.score(reference, batch)
        batch = batch._replace(old_logprobs=batch.rollout_logprobs, ref_logprobs=np.asarray(ref))
        if has_kl_in_rewards(config):
            packed, [batch] = kl_in_rewards(packed, [batch], self.groups, config)
        return Scored(batch, np.asarray(now), np.asarray(entropy), np.argsort(part), layout)


def open_replay(path: Path, *, step: int | None = None) -> Replay:
    """The episodes of a run and parameters of the same run.

    Args:
        path: a run folder (parameters of its newest checkpoint, or of its start if it has none), or RUN/checkpoints/N.
        step: whose episodes; None = the newest up to the checkpoint in which some group has different rewards.

    Raises:
        ConfigError: no run, no saved episodes, or none with a signal.
        CheckpointError: not the checkpoint that was asked for.
    """
    saved = find_policy(path)
    if saved.run is None or saved.warm_start:
        raise ConfigError(
            f"{path} has no rollouts: give a run folder, or one of its checkpoints (RUN/checkpoints/STEP)"
        )
    config = config_of(saved, [], [ONE_BATCH])
    policy = open_saved(saved, config)
    mesh = open_mesh(config, policy)
    if saved.step is None and Checkpoints(saved.run.checkpoints, read_only=True).latest_step() is None:
        params, at = Learning(config, policy, mesh).load(start_folder(saved, config)), 0
    else:
        params, at = read_params(saved, config, policy, mesh)
    found, groups = _groups_with_signal(saved.run.root, at, step, config)
    return Replay(saved, policy, mesh, params, at, found, groups)


def start_folder(saved: SavedPolicy, config: Config) -> Path:
    """HF folder of the policy at the first step."""
    assert saved.run is not None
    return saved.run.start if saved.run.start.exists() else source_folder(saved, config)


def recorded_groups(run: Path, step: int, *, with_signal: bool = False) -> list[Group]:
    """The groups of a training step, as they were collected; a group ends where another task or attempt begins.

    Args:
        run, step: where they are.
        with_signal: only those with an advantage: what dynamic sampling has trained on.
    """
    groups: list[list[Episode]] = []
    signal: list[bool] = []
    for row in load_episodes(run, step=step, kind="train"):
        episode = _episode(row)
        last = groups[-1][-1] if groups else None
        if last is None or last.task_id != episode.task_id or last.member >= episode.member:
            groups.append([])
            signal.append(False)
        groups[-1].append(episode)
        signal[-1] |= bool(row["advantage"])
    kept = [members for members, has in zip(groups, signal, strict=True) if has or not with_signal]
    return [Group(members[0].task_id, tuple(members)) for members in kept]


def _groups_with_signal(run: Path, newest: int, step: int | None, config: Config) -> tuple[int, list[Group]]:
    try:
        steps = sorted({row["step"] for row in load_episodes(run, kind="train")}, reverse=True)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    if not steps or (step is not None and step not in steps):
        there = f"there are those of steps {steps[-1]} to {steps[0]}" if steps else "logging.save_episodes was off"
        raise ConfigError(f"{run} has no saved training episodes{'' if step is None else f' of step {step}'}: {there}")
    wanted = [step] if step is not None else [s for s in steps if s <= max(newest, 1)] or steps
    for number in wanted:
        groups = recorded_groups(run, number, with_signal=config.grpo.dynamic_sampling > 0)
        rewards = [[e.reward for e in group.episodes if e.reward is not None] for group in groups]
        if any(len(set(values)) > 1 for values in rewards):
            return number, groups
    which = f"step {step}" if step is not None else "any step"
    raise ConfigError(
        f"no group of {which} of {run} has different rewards, so there is nothing to learn from; choose another --step"
    )


def _episode(row: dict[str, Any]) -> Episode:
    names = ("task_id", "member", "reward", "reward_parts", "success", "messages", "timings", "counters", "error")
    return Episode(
        trajectories=tuple(Trajectory(**arrays) for arrays in row["trajectories"]),
        outcome=Outcome(row["outcome"]),
        turn_rewards=tuple(row["turn_rewards"]),
        **{name: row[name] for name in names},
    )
