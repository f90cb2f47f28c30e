"""Runs with other objectives than the default one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hermes_jax.telemetry.episodes import load_episodes
from tests.e2e.runs import Command, kill_when, metrics

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
        "w = (exp(mean(old - rollout)) if exp(mean(old - rollout)) in [0.5, 2] else 0); "
        "A = group_mean_std(R - 1 * overlong(tokens, 10..80))\n"
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


def test_kl_in_the_reward(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    printed = command.train(f"run_dir={run}", *SHORT, "grpo.preset=rloo", "grpo.beta=0.5", "env.total_steps=3").out
    assert "objective: loss = sequence_sum[-A lp]; A = leave_one_out(R - 0.5 * sum k1(old - ref))\n" in printed
    first, *later = steps(run)
    assert abs(first["train/kl_penalty"]) < 1e-5, "the policy is still its reference"
    for step, row in enumerate(later, start=2):
        played = list(load_episodes(run, step=step, kind="train"))
        plain = np.reshape([episode["reward"] for episode in played], (2, 4))
        found = np.reshape([episode["advantage"] for episode in played], (2, 4))
        without = (plain - plain.mean(axis=1, keepdims=True)) * 4 / 3
        # What is left is the leave-one-out of the penalties: their differences, which sum to 0 in a group.
        assert 0 < np.abs(found - without).max() < 1
        np.testing.assert_allclose((found - without).sum(axis=1), 0, atol=1e-9)
        assert row["train/kl_penalty"] != 0
        assert "update/kl_loss" not in row, "it stands in one place"


REFILL = ("grpo.dynamic_sampling=2", "env.group_size=2", "env.total_steps=4", "env.eval_episodes=0")


def test_dynamic_sampling_is_the_same_after_a_kill(command: Command, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    options = (*REFILL, "checkpoint.every_steps=2")
    command.train(f"run_dir={straight}", *options)
    process = command.start("train", "--config", "tiny.yaml", f"run_dir={killed}", *options)
    kill_when(process, (killed / "checkpoints" / "2").exists)
    process.communicate()
    assert "resumed from the checkpoint of step 2" in command.run("train", "--resume", killed).out
    assert metrics(killed) == metrics(straight)

    rows = steps(straight)
    assert sum(row["groups/count"] for row in rows) > 2 * 4, "something was replaced"
    for step, row in enumerate(rows, start=1):
        played = list(load_episodes(straight, step=step, kind="train"))
        tasks = list(dict.fromkeys(episode["task_id"] for episode in played))
        first = 6 * (step - 1)
        assert tasks == [f"train-{first + n}" for n in range(int(row["groups/count"]))], "each step has its own tasks"
        rewards = np.reshape([episode["reward"] for episode in played], (-1, 2))
        advantages = np.reshape([episode["advantage"] for episode in played], (-1, 2))
        useful = np.flatnonzero(rewards[:, 0] != rewards[:, 1])
        assert len(useful) == 2 or len(tasks) == 6, "it went on as long as it should"
        assert np.flatnonzero(advantages[:, 0]).tolist() == useful[:2].tolist()
        assert row["groups/trained"] == (len(useful[:2]) or 2)
        assert row["groups/constant"] == pytest.approx(1 - len(useful) / len(tasks))
