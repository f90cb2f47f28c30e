"""Scenario `trainer-terminated`: SIGTERM, Ctrl-C and `kill -9`, whatever the trainer is doing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data.cases import cases_io
from tests.e2e.runs import PROJECT, Command, Finished, finish, metrics, rows, wait_until
from tests.tools.processes import alive, below, eventually, with_marker

[SCENARIO] = (one for one in cases_io.load("faults.json")["scenarios"] if one["id"] == "trainer-terminated")
WITHIN_S = SCENARIO["expected"]["exit_within_s"]
SLEEP = f"611.{os.getpid()}"
"""Seconds for which tools sleep: no other process of the machine does so for as long."""

UPDATES = 1000
"""As many take seconds."""

Start = Callable[..., subprocess.Popen[str]]


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


def sleepers() -> list[int]:
    """Processes of tools that sleep."""
    return [pid for pid in with_marker(f"sleep\0{SLEEP}") if alive(pid)]


@pytest.fixture
def start(command: Command) -> Iterator[Start]:
    """Starts trainers, which the test is expected to end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str | Path, **env: str) -> subprocess.Popen[str]:
        started.append(command.start("train", *arguments, **env))
        return started[-1]

    yield begin
    for trainer in started:
        if trainer.poll() is None:
            trainer.kill()
            trainer.communicate()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one run that the tests stop in turn; each goes on where the one before was stopped."""
    return tmp_path_factory.mktemp("terminated") / "run"


def test_in_the_warm_start(start: Start, run: Path) -> None:
    trainer = start("--config", "tiny.yaml", f"run_dir={run}", "env.eval_episodes=0")
    wait_until(trainer, (run / "warm_start" / "3").exists)
    done = terminate(trainer, signal.SIGTERM)
    assert "SIGTERM: saved at warm-start step" in done.err
    assert not (run / "start").exists()


def test_while_tools_run(start: Start, run: Path) -> None:
    trainer = start("--resume", run, PICK_SLEEP=SLEEP)
    wait_until(trainer, lambda: len(sleepers()) >= 2)
    assert len([pid for pid in with_marker("bwrap") if pid in below(trainer.pid)]) >= 2
    done = terminate(trainer, signal.SIGTERM)
    assert "resumed from the checkpoint of warm-start step" in done.out
    assert "SIGTERM: saved at step 0. " in done.err
    assert not sleepers()


def test_in_an_update(start: Start, run: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trainer = start("--resume", run, PICK_TRACE=str(trace))
    wait_until(trainer, lambda: trace.exists() and len(trace.read_text().splitlines()) >= 16)
    time.sleep(0.05)  # the second collection is over
    done = terminate(trainer, signal.SIGINT)
    assert "resumed from the checkpoint of step 0" in done.out
    assert re.search(r"SIGINT: saved at step [123]\. ", done.err)


def test_in_an_evaluation(start: Start, run: Path) -> None:
    more = ("env.eval_episodes=2", "env.steps_per_eval=1")
    trainer = start("--resume", run, *more, PICK_SLEEP_HELD_OUT=SLEEP)
    wait_until(trainer, lambda: len(sleepers()) >= 2)
    done = terminate(trainer, signal.SIGTERM)
    assert re.search(r"SIGTERM: saved at step [123]\. ", done.err)
    assert not sleepers()


def test_a_long_update_is_waited_for(command: Command, warm_policy: Path, tmp_path: Path) -> None:
    """It takes longer than anything else may take after a signal; its step is saved all the same."""
    impatient = "from hermes_jax import stopping, train; stopping.PATIENCE_S = 0.5; raise SystemExit(train.main())"
    options = [
        "--config",
        "tiny.yaml",
        f"run_dir={tmp_path / 'run'}",
        "model.builder=null",
        f"model.path={warm_policy}",
    ]
    options += ["warm_start.steps=0", "env.eval_episodes=0", "checkpoint.every_steps=0"]
    options += [f"grpo.iterations_per_batch={UPDATES}"]
    trace = tmp_path / "trace"
    process = subprocess.Popen(
        [sys.executable, "-c", impatient, *options],
        cwd=PROJECT,
        env={**command.env, "PICK_TRACE": str(trace)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(process, lambda: trace.exists() and len(trace.read_text().splitlines()) >= 8)
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = finish(process, 130)
    assert time.monotonic() - began > 2, "the update is too short to show anything"
    assert "SIGTERM: waiting for the update of step 1; a second signal ends at once\n" in done.err
    assert "SIGTERM: saved at step 1. " in done.err
    assert [row["update/count"] for row in rows(tmp_path / "run") if "update/count" in row] == [UPDATES]


def test_a_second_signal_ends_at_once(start: Start, warm_policy: Path, tmp_path: Path) -> None:
    trace, run = tmp_path / "trace", tmp_path / "run"
    options = ("env.eval_episodes=0", "grpo.iterations_per_batch=100000", "warm_start.steps=0")
    model = ("model.builder=null", f"model.path={warm_policy}")
    trainer = start("--config", "tiny.yaml", f"run_dir={run}", *model, *options, PICK_TRACE=str(trace))
    wait_until(trainer, lambda: trace.exists() and len(trace.read_text().splitlines()) >= 8)
    time.sleep(1.0)  # now it is in an update that would take minutes
    began = time.monotonic()
    done = terminate(trainer, signal.SIGINT, signal.SIGINT)
    assert time.monotonic() - began < 3
    assert "SIGINT: ended at once, as a signal came again; nothing is saved yet. Start again with: " in done.err


def test_kill_9(start: Start, run: Path) -> None:
    trainer = start("--resume", run, PICK_SLEEP=SLEEP)
    wait_until(trainer, lambda: len(sleepers()) >= 2)
    family = below(trainer.pid)
    trainer.kill()
    trainer.communicate()
    assert eventually(lambda: not any(alive(pid) for pid in family), 5.0)
    assert not sleepers()


def test_it_is_still_the_same_run(command: Command, run: Path, straight: Path) -> None:
    done = command.run("train", "--resume", run, "env.total_steps=4")
    assert re.search(r"resumed from the checkpoint of step [123]\n", done.out)
    here, there = (
        {place: {name: x for name, x in row.items() if not name.startswith("eval/")} for place, row in found.items()}
        for found in (metrics(run), metrics(straight))  # evaluations were asked for at other times
    )
    for place in [("train", step) for step in range(1, 5)] + [("warm_start", step) for step in range(1, 25)]:
        assert here[place] == there[place], place
