"""Runs with other objectives than the default one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.e2e.runs import Command, metrics

SHORT = ("env.total_steps=2", "env.eval_episodes=0", "checkpoint.every_steps=0")


def steps(run: Path) -> list[dict[str, float]]:
    found = metrics(run, all_names=True)
    return [row for (phase, step), row in sorted(found.items()) if phase == "train" and step > 0]


@pytest.fixture(scope="module")
def corrected(command: Command, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run by a preset with a correction, an entropy bonus and punished lengths on top, and what it printed."""
    run = tmp_path_factory.mktemp("corrected") / "run"
    options = ("grpo.preset=gspo", "grpo.correction=sequence_mask_geometric", "grpo.entropy_coef=0.01")
    overlong = ("env.max_episode_tokens=80", "grpo.overlong_cache=70")
    return run, command.train(f"run_dir={run}", *SHORT, *options, *overlong).out


def test_the_objective_in_force_is_printed_and_its_plain_values_are_kept(corrected: tuple[Path, str]) -> None:
    run, printed = corrected
    assert (
        "objective: loss = sequence_mean[w * -min(r A, clip(r, 0.9997, 1.0004) A)] - 0.01 * sequence_mean[entropy]; "
        "r = exp(clip(mean(lp - old), +-20)); "
        "w = (exp(mean(old - rollout)) if exp(mean(old - rollout)) in [0.5, 2] else 0)"
    ) in printed
    resolved = (run / "config.yaml").read_text()
    for line in ("preset: null", "objective: gspo", "clip_low: 0.0003", "clip_high: 0.0004", "overlong_cache: 70"):
        assert f"\n  {line}\n" in resolved


def test_engine_and_learner_agree_so_the_correction_changes_next_to_nothing(corrected: tuple[Path, str]) -> None:
    for row in steps(corrected[0]):
        assert row["correction/effective_sample_size"] == pytest.approx(1, abs=1e-4)
        assert row["correction/affected_frac"] == 0
        assert row["correction/weight_mean"] == pytest.approx(1, abs=1e-3)
        entropy = row["update/policy_loss"] - row["update/loss"]
        assert entropy > 0
        assert math.isfinite(row["update/grad_norm"])
