"""Finds the weights that a path names: a run folder, one of its checkpoints, or an HF folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from hermes_jax.assembly import Policy, grpo_optimizer, read_policy, warm_start_optimizer
from hermes_jax.config import Config, ConfigError, load
from hermes_jax.learner.checkpoint import CheckpointError, Checkpoints
from hermes_jax.learning import Learning
from hermes_jax.run_folder import RunFolder


@dataclass(frozen=True)
class SavedPolicy:
    """Where weights are.

    Args:
        path: as given.
        run: the run folder they belong to; None for an HF folder.
        step: checkpoint of the run; None = the newest whole one.
        warm_start: the checkpoint is one of the warm start.
    """

    path: Path
    run: RunFolder | None = None
    step: int | None = None
    warm_start: bool = False


def find_policy(path: Path) -> SavedPolicy:
    """What a path names.

    Raises:
        ConfigError: it is neither a run, nor a checkpoint of one, nor an HF folder.
    """
    if (path / "model.safetensors").exists() or (path / "model.safetensors.index.json").exists():
        return SavedPolicy(path)
    if (path / "config.yaml").exists():
        return SavedPolicy(path, RunFolder(path))
    owner = path.parent.parent
    if path.name.isdigit() and (owner / "config.yaml").exists():
        return SavedPolicy(
            path, RunFolder(owner), int(path.name), path.parent.name == RunFolder(owner).warm_checkpoints.name
        )
    raise ConfigError(
        f"{path} is no run folder (config.yaml), no checkpoint (RUN/checkpoints/STEP) and no model folder "
        "(config.json and model.safetensors)"
    )


def config_of(saved: SavedPolicy, files: list[str], overrides: list[str]) -> Config:
    """The run's own config under the given files and overrides; an HF folder becomes `model.path`."""
    if saved.run is not None:
        return load(saved.run.config, *files, overrides=overrides)
    return load(*files, overrides=["model.builder=null", f"model.path={saved.path}", *overrides])


def source_folder(saved: SavedPolicy, config: Config) -> Path:
    """The HF folder whose config, tokenizer and template belong to the weights."""
    if saved.run is None:
        return saved.path
    return saved.run.policy if saved.run.policy.exists() else Path(str(config.model.path))


def read_params(
    saved: SavedPolicy, config: Config, policy: Policy, mesh: Any, *, best: bool = False
) -> tuple[Any, int]:
    """Parameters and the step they are from (0 for an HF folder); on the device thread.

    Args:
        best: of the checkpoints of the run, the one with the best `checkpoint.best_metric`.

    Raises:
        CheckpointError: the run has no whole checkpoint, or not the one that was asked for.
        ConfigError: the best is asked for of something that is no run.
    """
    if best and (saved.run is None or saved.step is not None):
        raise ConfigError(f"--best chooses among the checkpoints of a run: give its folder, {saved.path} is none")
    learning = Learning(config, policy, mesh)
    if saved.run is None:
        return learning.load(saved.path), 0
    folder = saved.run.warm_checkpoints if saved.warm_start else saved.run.checkpoints
    checkpoints = Checkpoints(folder, read_only=True)
    step = saved.step
    if best:
        step = _best_step(checkpoints, folder, config)
    optimizer = (warm_start_optimizer if saved.warm_start else grpo_optimizer)(config)
    restored = checkpoints.restore(learning.abstract(optimizer), step)
    jax.tree.map(lambda x: x.delete(), restored.state.opt_state)
    return restored.state.params, restored.step


def _best_step(checkpoints: Checkpoints, folder: Path, config: Config) -> int:
    step = checkpoints.best_step()
    if step is not None:
        return step
    newest = checkpoints.latest_step()
    instead = "it holds none" if newest is None else f"the newest, without --best, is that of step {newest}"
    raise CheckpointError(
        f"no checkpoint in {folder} was ranked by {config.checkpoint.best_metric} (checkpoint.best_metric): none was "
        f"saved together with an evaluation that gives it; {instead}. Evaluations need env.eval_episodes; there is one "
        "after the last step, and others at checkpoints where env.steps_per_eval and checkpoint.every_steps meet"
    )


def open_saved(saved: SavedPolicy, config: Config) -> Policy:
    """Tokenizer, shape and banned ids that belong to the weights."""
    return read_policy(source_folder(saved, config))
