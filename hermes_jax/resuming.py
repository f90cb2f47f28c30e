"""May a run go on under this config? What is trained must not change on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_jax.config import Config, ConfigError

FREE = (
    "run_dir",
    "compilation_cache",
    "env.total_steps",
    "env.steps_per_eval",
    "env.eval_episodes",
    "env.max_concurrent_episodes",
    "grpo.max_skipped_steps",
    "checkpoint.",
    "logging.",
    "mesh.",
    "openai.api_key",
)
"""Options (or blocks) that a resumed run may change: its updates are the same, up to rounding for `mesh`."""


def check_same_training(saved: Config, config: Config, file: Path) -> None:
    """Compares the config of a run with the one under which it shall go on.

    Args:
        saved, file: what the run was started with, and where that is written.

    Raises:
        ConfigError: they differ in what is trained; the message lists every such option.
    """
    before, now = dict(_flat(saved.model_dump())), dict(_flat(config.model_dump()))
    paths = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    changed = [path for path in paths if not path.startswith(FREE)]
    if "env.total_steps" in paths and config.optimizer.schedule != "constant":
        changed.append("env.total_steps")  # a falling learning rate depends on where it ends
    if changed:
        lines = "\n".join(f"  {path}: {before.get(path)!r} -> {now.get(path)!r}" for path in changed)
        raise ConfigError(
            f"a run can't be resumed with other options of what it trains (first value: {file}):\n{lines}\n"
            "Leave them as they were, or start a new run from its weights: "
            "python -m hermes_jax.export RUN --to DIR, then model.path=DIR"
        )


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
