"""Runs of the real commands in processes of their own, small enough for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hermes_jax.telemetry.writers import read_metrics

REPOSITORY = Path(__file__).parents[2]
PROJECT = Path(__file__).parent / "project"
"""A user's folder: a config and environments of its own. The commands run in it."""
CONFIG = "tiny.yaml"

DEPENDS_ON_TIME = (
    "seconds/",
    "speed/",
    "system/",
    "device/",
    "loop_lag_s",
    "eval/seconds",
    "warm_start/seconds",
    "warm_start/trained_tokens_per_s",
    # Which requests share a call of the engine depends on when the tools answer; what it samples does not.
    "engine/busy_s",
    "engine/copied_slots",
    "engine/decode_",
    "engine/prefill_",
    "engine/compilations",
)
"""Beginnings of the names of metrics that two runs of one config need not have in common."""


class Command:
    """Starts commands of the package; they share compiled programs, as most of the time would go into these.

    Args:
        cache: folder of the compiled programs.
    """

    def __init__(self, cache: Path) -> None:
        self.env = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def start(self, command: str, *arguments: str | Path, **env: str) -> subprocess.Popen[str]:
        """`python -m hermes_jax.<command>`, leader of a process group of its own, output to pipes."""
        return subprocess.Popen(
            [sys.executable, "-m", f"hermes_jax.{command}", *map(str, arguments)],
            cwd=PROJECT,
            env={**self.env, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, command: str, *arguments: str | Path, status: int = 0, **env: str) -> Finished:
        """Runs a command to its end, which must have that exit status."""
        return finish(self.start(command, *arguments, **env), status)

    def train(self, *arguments: str | Path, status: int = 0, **env: str) -> Finished:
        """Trains by the tiny config."""
        return self.run("train", "--config", CONFIG, *arguments, status=status, **env)


class Finished:
    """What an ended command printed."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    def __repr__(self) -> str:
        return f"status {self.status}\n{self.out}\n{self.err}"

    @property
    def error(self) -> str:
        """The one message of a command that failed for a reason that the user can mend; no traceback may be there."""
        assert "Traceback" not in self.err + self.out, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self
        return self.err[self.err.index("error: ") :]


def finish(process: subprocess.Popen[str], status: int | None = None, seconds: float = 300) -> Finished:
    """Waits for the end."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    finished = Finished(process.returncode, out, err)
    assert status is None or process.returncode == status, finished
    return finished


def kill_when(process: subprocess.Popen[str], holds: Callable[[], bool], number: int = signal.SIGKILL) -> None:
    """Sends a signal as soon as something holds."""
    wait_until(process, holds)
    process.send_signal(number)


def wait_until(process: subprocess.Popen[str], holds: Callable[[], bool], seconds: float = 240) -> None:
    """Waits until something holds; the process must live that long."""
    end = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, f"the command ended too early: {finish(process)}"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def metrics(run: Path, *, all_names: bool = False) -> dict[tuple[str, int], dict[str, Any]]:
    """(phase, step) -> numbers of a run, without those that depend on time."""
    merged: defaultdict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
    for row in read_metrics(run / "metrics.jsonl"):
        place = row.pop("phase"), row.pop("step")
        merged[place] |= {name: x for name, x in row.items() if all_names or not name.startswith(DEPENDS_ON_TIME)}
    return dict(merged)


def rows(run: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
