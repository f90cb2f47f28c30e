"""A policy loss of one's own trains, by config and in Python; losses are compared on what a run has recorded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hermes_jax.loss_comparison import compare_losses
from hermes_jax.replay import Replay, Scored, open_replay, recorded_groups
from hermes_jax.telemetry.episodes import EpisodeLog, load_episodes
from tests.e2e.runs import PROJECT, Command, rows

SHORT = ("warm_start.steps=12", "env.total_steps=2", "env.eval_episodes=0", "env.steps_per_eval=0")
SHORT = (*SHORT, "checkpoint.keep_best=0", "checkpoint.every_steps=2")

IN_PYTHON = """
import asyncio, sys
from pathlib import Path
from hermes_jax import WorkerServer, open_run_folder
from hermes_jax.config import load
from losses import soft_clip

config = load("tiny.yaml", overrides=sys.argv[1:])
run = open_run_folder(Path(config.run_dir), resume=False, overwrite=False)
with WorkerServer() as worker:
    from hermes_jax import Trainer
    asyncio.run(Trainer(config, run, worker, policy_loss=soft_clip).run())
"""


@pytest.fixture(scope="module")
def own(command: Command, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with a loss that its config names, and what it printed."""
    run = tmp_path_factory.mktemp("own") / "run"
    done = command.train(f"run_dir={run}", *SHORT, "grpo.policy_loss=losses:soft_clip")
    return run, done.out


def test_a_loss_named_in_the_config_trains(own: tuple[Path, str]) -> None:
    run, printed = own
    formula = "token_mean[soft_clip(clip_low=0.2)]; soft_clip = losses:soft_clip, in place of a named objective"
    assert f"objective: loss = {formula}" in printed
    updates = [row for row in rows(run) if "update/loss" in row]
    assert len(updates) == 2
    assert all(0 <= row["policy_loss/far"] <= 1 for row in updates)
    assert all(row["update/update_skipped"] == 0 for row in updates)


def test_a_checkpoint_is_read_without_the_loss(own: tuple[Path, str], command: Command, tmp_path: Path) -> None:
    """From a folder in which its module is not found."""
    export = [sys.executable, "-m", "hermes_jax.export", str(own[0]), "--to", str(tmp_path / "exported")]
    subprocess.run(export, cwd=tmp_path, env=command.env, check=True, capture_output=True)
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_a_function_given_to_the_trainer_is_the_same_run(
    own: tuple[Path, str], command: Command, tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", IN_PYTHON, f"run_dir={tmp_path / 'run'}", *SHORT]
    env = {**command.env, "PYTHONPATH": f"{command.env['PYTHONPATH']}:{PROJECT}"}
    done = subprocess.run(arguments, cwd=PROJECT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "soft_clip = losses:soft_clip, in place of a named objective" in done.stdout
    mine, theirs = ([r["update/loss"] for r in rows(run) if "update/loss" in r] for run in (tmp_path / "run", own[0]))
    assert mine == theirs


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "losses:of_the_whole",
            "grpo.policy_loss: policy loss losses:of_the_whole returns a loss of shape (), not (4, ",
        ),
        ("losses:nowhere", "grpo.policy_loss: 'losses:nowhere' is no 'module:function' that can be imported"),
        ("nowhere:soft_clip", "No module named 'nowhere'"),
        ("losses", "grpo.policy_loss: 'losses' is no 'module:function'"),
    ],
)
def test_a_wrong_loss_is_found_before_anything_is_written(
    option: str, words: str, command: Command, tmp_path: Path
) -> None:
    error = command.train(f"run_dir={tmp_path / 'run'}", f"grpo.policy_loss={option}", status=1).error
    assert words in error
    assert not (tmp_path / "run").exists()
    if option.endswith("whole"):
        assert "expected: def of_the_whole(logprobs, old_logprobs, advantages, ...) -> loss" in error


# -- comparing ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replay(straight: Path) -> Replay:
    """The last step's episodes under the last parameters."""
    return open_replay(straight)


def in_config(replay: Replay, *overrides: str) -> Scored:
    """The batch under the run's config and overrides."""
    learning = replay.learning(replay.config())
    return replay.scored(replay.config(overrides), learning, replay.reference(learning))


def test_the_replayed_batch_is_that_of_the_run(replay: Replay, straight: Path) -> None:
    saved = list(load_episodes(straight, step=replay.step, kind="train"))
    assert [e.task_id for g in replay.groups for e in g.episodes] == [row["task_id"] for row in saved]
    scored = in_config(replay)
    trajectories = [(row["advantage"], t) for row in saved for t in row["trajectories"]]
    for name in ("tokens", "turn", "policy_version", "temperature"):
        want = np.concatenate([t[name][t["mask"]] for _, t in trajectories])
        np.testing.assert_array_equal(scored.trained(getattr(scored.batch, name)), want, name)
    want = np.concatenate([t["logprobs"][t["mask"]] for _, t in trajectories])
    np.testing.assert_array_equal(scored.trained(scored.batch.old_logprobs), want)
    want = np.concatenate([np.full(t["mask"].sum(), advantage, np.float32) for advantage, t in trajectories])
    np.testing.assert_array_equal(scored.trained(scored.batch.advantages), want)


def test_figures_against_their_definitions(replay: Replay) -> None:
    found = compare_losses(replay, ["run", "reinforce", "clip", "rloo", "gspo"])
    run, reinforce, clip, rloo, _ = found.losses
    scored = in_config(replay)
    old = scored.trained(scored.batch.old_logprobs)
    count, ratio, advantages = len(old), np.exp(found.log_ratios), reinforce.advantages
    np.testing.assert_allclose(reinforce.loss, -np.mean(advantages * (found.log_ratios + old)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(reinforce.push, advantages / count, rtol=1e-5)
    clipped = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    np.testing.assert_allclose(clip.push, np.where(clipped, 0, ratio * advantages / count), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(clip.clip_low + clip.clip_high, clipped.mean(), atol=1e-6)
    np.testing.assert_allclose(found.effective_samples, ratio.sum() ** 2 / (count * (ratio**2).sum()), rtol=1e-5)
    assert (run.loss, run.grad_norm) == (clip.loss, clip.grad_norm)
    np.testing.assert_allclose(np.diag(found.cosines)[:4], 1, rtol=1e-6)
    np.testing.assert_allclose(found.cosines, found.cosines.T)
    np.testing.assert_allclose(found.cosines[0, 2], 1, rtol=1e-6)
    assert found.cosines[1, 2] < 1
    assert not np.allclose(rloo.advantages, reinforce.advantages), "a preset's advantages are its own"
    assert len(found.texts) == count


def test_the_command_prints_and_draws(straight: Path, command: Command, tmp_path: Path) -> None:
    names = "run,dapo,losses:soft_clip"
    picture = tmp_path / "losses.png"
    done = command.run("compare_losses", "--rollouts", straight, "--losses", names, "--top", "2", "--to", picture)
    assert re.search(r"step [1-6]: 8 episodes in 2 groups, \d+ trained tokens; parameters of checkpoint 6", done.out)
    for name in names.split(","):
        assert re.search(rf"^{name} +-?[\d.e-]+ +[\d.e-]+ +[\d.]+% +[\d.]+% +[\d.]+%$", done.out, re.MULTILINE), (
            done.out
        )
        assert f"{name} pushes most\n" in done.out
    assert done.out.count("  ratio ") == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert done.err == ""


def test_an_earlier_checkpoint_and_its_step(straight: Path, command: Command) -> None:
    done = command.run("compare_losses", "--rollouts", straight / "checkpoints" / "3", "--losses", "run")
    assert "parameters of checkpoint 3" in done.out
    assert re.search(r"step [1-3]: ", done.out)


def test_what_can_not_be_compared(straight: Path, command: Command, tmp_path: Path) -> None:
    def error(*arguments: str | Path) -> str:
        return command.run("compare_losses", *arguments, status=1).error

    assert "unknown loss 'nope': choose among run, grpo, dapo," in error("--rollouts", straight, "--losses", "nope")
    assert "each once; got run, run" in error("--rollouts", straight, "--losses", "run,run")
    message = error("--rollouts", straight, "--losses", "run", "--step", "99")
    assert "no saved training episodes of step 99: there are those of steps 1 to 6" in message
    assert "has no rollouts: give a run folder" in error("--rollouts", straight / "final", "--losses", "run")
    assert "returns a loss of shape ()" in error("--rollouts", straight, "--losses", "losses:of_the_whole")
    assert json.loads((straight / "report.json").read_text())["step"] == 6


def test_after_dynamic_sampling_only_what_was_trained_on_is_replayed(straight: Path, tmp_path: Path) -> None:
    """The saved episodes of groups that were replaced have advantage 0."""
    rows = list(load_episodes(straight, step=6, kind="train"))
    for row in rows:
        row["trajectories"] = [SimpleNamespace(**arrays) for arrays in row["trajectories"]]
    advantages = [0.0] * 4 + [1.0, -1.0, 0.0, 0.0]
    EpisodeLog(tmp_path).write(6, [SimpleNamespace(**row) for row in rows], advantages=advantages)
    tasks = [[group.task_id for group in recorded_groups(tmp_path, 6, with_signal=only)] for only in (False, True)]
    assert tasks == [[rows[0]["task_id"], rows[4]["task_id"]], [rows[4]["task_id"]]]
