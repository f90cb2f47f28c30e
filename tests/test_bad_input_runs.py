"""Faults that show only in a run: rewards, tools, numbers and disks. The run says what is wrong and loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hermes_jax.episode_failures import FAILED
from hermes_jax.learner import manifest
from hermes_jax.telemetry.episodes import load_episodes
from tests.e2e.runs import CONFIG, PROJECT, Command, finish, metrics, wait_until
from tests.tools.processes import below, with_marker

SMALL = ("env.eval_episodes=0", "env.total_steps=1")


def options(policy: Path, run: Path, *more: str) -> tuple[str, ...]:
    """A run of one step from a policy that calls tools."""
    return (f"run_dir={run}", f"model.path={policy}", "model.builder=null", "warm_start.steps=0", *SMALL, *more)


def broken(policy: Path, run: Path, fault: str, *more: str) -> tuple[str, ...]:
    return options(policy, run, "env.name=broken", f"env.options.fault={fault}", *more)


def played(run: Path) -> list[dict[str, Any]]:
    return list(load_episodes(run, step=1, kind="train"))


# -- rewards -----------------------------------------------------------------------------------------------------------

DRIVER = """
import sys
from hermes_jax.train import main
status = main(sys.argv[1:])
assert status == 0, status
assert "torch" not in sys.modules
print("no torch")
"""


def test_rewards_that_fail_are_missing_and_torch_is_not_imported(
    command: Command, warm_policy: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")  # where it isn't installed this would show nothing
    arguments = ["--config", CONFIG, *broken(warm_policy, tmp_path / "run", "rewards", "env.group_size=6")]
    driver = [sys.executable, "-c", DRIVER, *arguments]
    done = subprocess.run(driver, cwd=PROJECT, env=command.env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "no torch"
    assert "environment broken: its reward uses wall-clock time, so a run can't be reproduced exactly" in done.stdout
    first = "the first: task train-0, member 0: ValueError: boom"
    assert f"warning: step 1: 4 of 12 episodes: verifier_error; {first}" in done.stdout
    assert [episode["outcome"] for episode in played(tmp_path / "run")] == [
        outcome for _ in range(2) for outcome in ("verifier_error", "completed", "verifier_error", *["completed"] * 3)
    ]
    for episode in played(tmp_path / "run"):
        assert (episode["reward"] is None) == (episode["member"] < 3)
        if episode["member"] == 2:
            assert "nan" in episode["error"]
    row = metrics(tmp_path / "run")["train", 1]
    assert row["train/reward_missing"] == 0.5
    assert row["train/counter/verifier_errors"] == pytest.approx(4 / 12)
    assert row["update/num_sequences"] <= 6


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", ["8 verifier_error; the first: task train-0, member 0: ValueError: boom"]),
        ("length", ["8 verifier_error; the first: task train-0, member 0: ", "3", "4"]),
        ("prepare", ["8 env_error; the first: task train-0, member 0: KeyError: 'no such file in the data set'"]),
    ],
)
def test_nothing_can_be_used(
    fault: str, words: Sequence[str], command: Command, warm_policy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    error = command.train(*broken(warm_policy, run, fault), status=1).error
    assert "no episode of step 1 can be used: of 8, " in error
    for word in words:
        assert word in error
    assert "go on with --resume" in error
    assert len(played(run)) == 8
    assert manifest.steps(run / "checkpoints") == [0], "what there was is saved"


# -- tools -------------------------------------------------------------------------------------------------------------


def test_tools_that_misbehave(command: Command, warm_policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    context = ("model.context_length=192", "learner.row_widths=[192]")
    more = ("env.groups_per_step=4", "env.terminal_timeout=1", "env.tool_output_limit=64", *context)
    command.train(*broken(warm_policy, run, "tools", *more), PICK_SLEEP=f"633.{os.getpid()}")
    assert not with_marker(f"sleep\000633.{os.getpid()}")
    im_end = json.loads((warm_policy / "tokenizer.json").read_text())["added_tokens"][2]
    assert im_end["content"] == "<|im_end|>"
    shown: dict[int, set[str]] = {n: set() for n in range(4)}
    for episode in played(run):
        assert episode["outcome"] in ("completed", "max_turns", "length")
        number = int(episode["task_id"].removeprefix("train-"))
        tools = [m["content"] for m in episode["messages"] if m["role"] == "tool"]
        shown[number].update(tools)
        [trajectory] = episode["trajectories"]
        closed = int((trajectory["tokens"] == im_end["id"]).sum())
        assert closed <= len(episode["messages"]) + 1, "one per message, that of the tools too; none from a tool"
        assert np.isfinite(trajectory["logprobs"]).all()
    assert any("timed out after 1 s" in text for text in shown[0])
    assert "<|im_end|><|im_start|>assistant" in shown[1]
    assert any("bytes left out" in text and len(text) < 200 for text in shown[2])
    assert "a\ufffd\ufffdb" in shown[3]


@pytest.mark.parametrize(("fault", "reached"), [("late_tools", 1), ("late_rewards", 1), ("evaluation", 0)])
def test_the_worker_server_is_killed(
    fault: str, reached: int, command: Command, warm_policy: Path, tmp_path: Path
) -> None:
    """The run ends with what it has reached, and goes on from there as if nothing had happened."""
    run, seconds = tmp_path / "run", f"634.{os.getpid()}"
    more = ("env.total_steps=2", "env.eval_episodes=2", "checkpoint.every_steps=0")
    variable = "PICK_SLEEP_HELD_OUT" if fault == "evaluation" else "LATE_SLEEP"
    arguments = broken(warm_policy, run, fault, *more)
    trainer = command.start("train", "--config", CONFIG, *arguments, **{variable: seconds})
    wait_until(trainer, lambda: bool(with_marker(f"sleep\000{seconds}")))
    [server] = set(with_marker("worker_main")) & set(below(trainer.pid))
    os.kill(server, signal.SIGKILL)
    begun = time.monotonic()
    done = finish(trainer, 1)
    assert time.monotonic() - begun < 15
    assert f"saved at step {reached}. Go on with: " in done.err
    error = done.error
    assert f"the worker server (process {server}) ended with exit code -9; " in error
    assert "start the run again (with --resume)" in error
    assert not with_marker(f"sleep\000{seconds}")
    assert manifest.steps(run / "checkpoints") == [reached]
    assert len(list(load_episodes(run, kind="train"))) == 8 * reached, "none of the episodes that could only fail"
    command.run("train", "--resume", run)
    assert not {e["outcome"] for e in load_episodes(run)} & {str(outcome) for outcome in FAILED}
    assert json.loads((run / "report.json").read_text())["step"] == 2


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_updates_that_are_not_finite_end_the_run(command: Command, warm_policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("optimizer.learning_rate=1e30", "grpo.iterations_per_batch=6", "grpo.max_skipped_steps=4")
    error = command.train(*options(warm_policy, run, *more), status=1).error
    assert "5 updates in a row had a loss or gradient that is not finite (the last one: loss " in error
    assert "lower learning rate" in error
    assert "export" in error
    row = metrics(run)["train", 1]
    assert row["update/skipped_in_a_row"] == 5
    assert row["update/count"] == 1


def test_weights_that_are_not_finite(command: Command, warm_policy: Path, tmp_path: Path) -> None:
    policy = shutil.copytree(warm_policy, tmp_path / "policy")
    tensors = load_file(policy / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    error = command.train(*options(policy, tmp_path / "run"), status=1).error
    assert "no episode of step 1 can be used: of 8, 8 error; the first: task train-0, member 0: request " in error
    assert "logits that are not finite under weights 0; do the weights hold NaN or infinity?" in error
    evaluation = ("evaluate", policy, "--config", tmp_path / "run" / "config.yaml", "env.eval_episodes=2")
    error = command.run(*evaluation, status=1).error
    assert "no episode of the evaluation can be used: of 4, 4 error; the first: task held-out-0, " in error


# -- disks -------------------------------------------------------------------------------------------------------------


def test_disk_full_while_saving(command: Command, warm_policy: Path, tmp_path: Path) -> None:
    """Files may not grow beyond 200 kB, which only a checkpoint needs; afterwards the run goes on."""
    run = tmp_path / "run"
    arguments = ["--config", CONFIG, *options(warm_policy, run, "env.total_steps=2", "checkpoint.every_steps=1")]
    limited = ["bash", "-c", 'ulimit -f 200; exec "$@"', "bash", sys.executable, "-m", "hermes_jax.train", *arguments]
    done = subprocess.run(limited, cwd=PROJECT, env=command.env, text=True, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "error: could not save step 1" in done.stderr
    assert "Is the disk full" in done.stderr
    assert manifest.steps(run / "checkpoints") == []
    assert len(played(run)) == 8
    again = command.run("train", "--resume", run)
    assert again.status == 0
    assert manifest.steps(run / "checkpoints") == [1, 2]
