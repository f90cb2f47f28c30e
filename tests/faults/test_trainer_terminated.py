"""Scenario `trainer-terminated`: SIGTERM, Ctrl-C and `kill -9`, whatever the trainer is doing."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.data.cases import cases_io
from tests.e2e.runs import Command, Finished, finish, metrics, wait_until
from tests.tools.processes import alive, below, eventually, with_marker

[SCENARIO] = (one for one in cases_io.load("faults.json")["scenarios"] if one["id"] == "trainer-terminated")
WITHIN_S = SCENARIO["expected"]["exit_within_s"]


def terminate(process: subprocess.Popen[str], *signals: int) -> Finished:
    """Sends signals and checks what is promised of every end: in time, with status 130, nothing left alive."""
    family = [process.pid, *below(process.pid)]
    assert len(family) >= 2, "the worker server belongs to it"
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.3)
    done = finish(process, 130, WITHIN_S)
    assert time.monotonic() - began < WITHIN_S
    assert eventually(lambda: not any(alive(pid) for pid in family), 1.0)
    assert "Traceback" not in done.err, done.err
    said = [line for line in done.err.splitlines() if "--resume" in line]
    assert len(said) == 1, done
    assert said[0].startswith(signal.Signals(signals[0]).name)
    return done


def sleepers(seconds: str) -> list[int]:
    """Processes of tools that sleep for so long."""
    return [pid for pid in with_marker(f"sleep\0{seconds}") if alive(pid)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one run that the tests stop in turn; each goes on where the one before was stopped."""
    return tmp_path_factory.mktemp("terminated") / "run"


def test_in_the_warm_start(command: Command, run: Path) -> None:
    trainer = command.start("train", "--config", "tiny.yaml", f"run_dir={run}", "env.eval_episodes=0")
    wait_until(trainer, (run / "warm_start" / "3").exists)
    done = terminate(trainer, signal.SIGTERM)
    assert "SIGTERM: saved at warm-start step" in done.err
    assert not (run / "start").exists()


def test_while_tools_run(command: Command, run: Path) -> None:
    trainer = command.start("train", "--resume", run, PICK_SLEEP="611.5")
    wait_until(trainer, lambda: len(sleepers("611.5")) >= 2)
    assert len([pid for pid in with_marker("bwrap") if pid in below(trainer.pid)]) >= 2
    done = terminate(trainer, signal.SIGTERM)
    assert "resumed from the checkpoint of warm-start step" in done.out
    assert "SIGTERM: saved at step 0. " in done.err
    assert not sleepers("611.5")


def test_in_an_update(command: Command, run: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trainer = command.start("train", "--resume", run, PICK_TRACE=str(trace))
    wait_until(trainer, lambda: trace.exists() and len(trace.read_text().splitlines()) >= 16)
    time.sleep(0.05)  # the second collection is over
    done = terminate(trainer, signal.SIGINT)
    assert "resumed from the checkpoint of step 0" in done.out
    assert re.search(r"SIGINT: saved at step [123]\. ", done.err)


def test_a_second_signal_ends_at_once(command: Command, warm_policy: Path, tmp_path: Path) -> None:
    trace, run = tmp_path / "trace", tmp_path / "run"
    options = ("env.eval_episodes=0", "grpo.iterations_per_batch=100000", "warm_start.steps=0")
    model = ("model.builder=null", f"model.path={warm_policy}")
    trainer = command.start("train", "--config", "tiny.yaml", f"run_dir={run}", *model, *options, PICK_TRACE=str(trace))
    wait_until(trainer, lambda: trace.exists() and len(trace.read_text().splitlines()) >= 8)
    time.sleep(1.0)  # now it is in an update that would take minutes
    began = time.monotonic()
    done = terminate(trainer, signal.SIGINT, signal.SIGINT)
    assert time.monotonic() - began < 3
    assert "SIGINT: ended at once, as a signal came again; nothing is saved yet. Start again with: " in done.err


def test_kill_9(command: Command, run: Path) -> None:
    trainer = command.start("train", "--resume", run, PICK_SLEEP="622.5")
    wait_until(trainer, lambda: len(sleepers("622.5")) >= 2)
    family = below(trainer.pid)
    trainer.kill()
    trainer.communicate()
    assert eventually(lambda: not any(alive(pid) for pid in family), 5.0)
    assert not sleepers("622.5")


def test_it_is_still_the_same_run(command: Command, run: Path, straight: Path) -> None:
    done = command.run("train", "--resume", run, "env.total_steps=4")
    assert re.search(r"resumed from the checkpoint of step [123]\n", done.out)
    here, there = metrics(run), metrics(straight)
    for step in (1, 2, 3, 4):
        assert here["train", step] == there["train", step]
    for step in range(1, 25):
        assert here["warm_start", step] == there["warm_start", step]
