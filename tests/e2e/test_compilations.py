"""Nothing compiles after the first step: 50 steps of all lengths, with evaluations, checkpoints and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_jax.telemetry.episodes import load_episodes
from tests.e2e.runs import Command, metrics

STEPS, STOPPED = 50, 28
NARROW = 72
"""The narrower of the two row widths of the config."""


@pytest.fixture(scope="module")
def run(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 50 steps, ended and resumed once."""
    run = tmp_path_factory.mktemp("many") / "run"
    options = ("env.steps_per_eval=10", "env.eval_episodes=2", "checkpoint.every_steps=8", "grpo.mini_batches=2")
    command.train(f"run_dir={run}", f"env.total_steps={STOPPED}", *options)
    command.run("train", "--resume", run, f"env.total_steps={STEPS}")
    return run


def test_nothing_compiles_after_the_first_step(run: Path) -> None:
    steps = {step: row for (phase, step), row in metrics(run, all_names=True).items() if phase == "train" and step}
    assert len(steps) == STEPS
    compiled = {step: row["system/compilations"] for step, row in steps.items() if row["system/compilations"]}
    assert compiled.keys() == {1, STOPPED + 1}, compiled
    assert not [step for step, row in steps.items() if row["engine/compilations"] and step not in (1, STOPPED + 1)]


def test_the_steps_are_of_varying_lengths(run: Path) -> None:
    longest = [
        max(len(t["tokens"]) for e in load_episodes(run, step=step, kind="train") for t in e["trajectories"])
        for step in range(1, STEPS + 1)
    ]
    assert len(set(longest)) > 5
    assert min(longest) <= NARROW < max(longest)
    totals = [row["batch/tokens"] for (_, step), row in metrics(run).items() if "batch/tokens" in row]
    assert len(set(totals)) > STEPS / 2
