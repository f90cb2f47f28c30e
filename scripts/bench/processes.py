"""Runs whole processes one after the other and says what each took; used by the benchmarks in this folder.

A benchmark's figures come from processes of their own, so that no side sees the other's memory, threads or caches. Each
prints a JSON object as its last line. Nothing heavy is imported here: on Linux a new process inherits the peak memory
of the one that started it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
GIB = 2**30


class BenchError(RuntimeError):
    """A benchmark that can't be run: what, why, what to do."""


@dataclass(frozen=True)
class Command:
    """A process to measure.

    Args:
        arguments: program and arguments.
        environment: on top of this process's own.
        limit_s: it is ended after so many seconds.
    """

    arguments: Sequence[str | Path]
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 1800.0


@dataclass(frozen=True)
class Run:
    """What one process printed and took.

    Args:
        result: its last line.
        wall_s: from its start to its end, imports and compilation included.
        cpu_s: CPU time of all its threads, and of processes that it waited for.
        peak_rss_bytes: largest resident memory, of it or of a process that it waited for.
        load: load average of the machine (1 minute) when it started.
    """

    result: dict[str, Any]
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    load: float


def ours(script: str, *arguments: str, limit_s: float = 1800.0) -> Command:
    """A script of this folder in the present Python, with the package of this checkout."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return Command(
        [sys.executable, REPOSITORY / "scripts" / "bench" / script, *arguments], {"PYTHONPATH": path}, limit_s
    )


def peer_python(peer: str) -> Path:
    """The Python of a peer's environment, by default `.venv-<peer>` in the repository; `HERMES_JAX_PEERS` moves it.

    Raises:
        BenchError: there is none.
    """
    folder = Path(os.environ.get("HERMES_JAX_PEERS", REPOSITORY)) / f".venv-{peer}"
    if not (folder / ".installed").is_file():
        raise BenchError(
            f"no complete environment {folder}: make it with `bash scripts/bench/setup_peers.sh {peer}` "
            "(HERMES_JAX_PEERS names another folder that holds it), or leave the peer out with --peer none"
        )
    return folder / "bin" / "python"


def peer(name: str, script: str, *arguments: str, limit_s: float = 3600.0) -> Command:
    """A script of this folder in a peer's environment; nothing of ours is on its path."""
    own = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return Command([peer_python(name), REPOSITORY / "scripts" / "bench" / script, *arguments], own, limit_s)


def run(command: Command) -> Run:
    """Runs the process to its end.

    Raises:
        BenchError: it failed, took too long or printed no JSON; with the end of its stderr.
    """
    load, began = os.getloadavg()[0], time.perf_counter()
    late = threading.Event()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [str(part) for part in command.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **command.environment},
            cwd=REPOSITORY,
            start_new_session=True,
        )

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(command.limit_s, end)
        timer.start()
        try:
            assert process.stdout is not None
            out = process.stdout.read().decode(errors="replace")
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            timer.cancel()
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or late.is_set():
            raise BenchError(_failure(command, process.returncode, late.is_set(), errors))
    return Run(_last_json(command, out), wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, load)


def alternate(commands: Mapping[str, Command], rounds: int) -> dict[str, list[Run]]:
    """Runs A B A B ...; one process at a time."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(run(command))
    return runs


def own_peak_rss() -> int:
    """Peak resident memory of this process so far (bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Smallest, median, and all of them."""
    return {"min": min(values), "median": statistics.median(values), "all": list(values)}


def side(runs: Sequence[Run], figure: str) -> dict[str, Any]:
    """One side's part of a report: the run with the median `figure`, and what all its processes took."""
    ordered = sorted(runs, key=lambda one: one.result[figure])
    return {
        **ordered[len(ordered) // 2].result,
        "peak_rss_gib": max(one.peak_rss_bytes for one in runs) / GIB,
        "rounds": {
            figure: [one.result[figure] for one in runs],
            "wall_s": [one.wall_s for one in runs],
            "cpu_s": [one.cpu_s for one in runs],
            "load": [one.load for one in runs],
        },
    }


def report(benchmark: str, **parts: Any) -> dict[str, Any]:
    """What a benchmark prints: how it was called, on what, and its parts."""
    machine = {"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    return {"benchmark": benchmark, "arguments": sys.argv[1:], "machine": machine, **parts}


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line, floats with six digits."""
    print(json.dumps(_rounded(value)), flush=True)


def main(body: Any) -> int:
    """Runs a benchmark's body, which returns a report; a `BenchError` becomes one line and status 1.

    Ended from outside (SIGTERM, Ctrl-C), it ends the process that it measures, with all that belongs to it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        print_json(body())
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def _failure(command: Command, status: int, late: bool, errors: Any) -> str:
    errors.seek(0)
    tail = "\n".join(errors.read().decode(errors="replace").splitlines()[-15:])
    what = f"took more than {command.limit_s:g} s" if late else f"ended with status {status}"
    return f"`{_in_words(command)}` {what}:\n{tail}"


def _last_json(command: Command, out: str) -> dict[str, Any]:
    lines = out.strip().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise BenchError(f"`{_in_words(command)}` printed no JSON object as its last line, but {lines[-1:]}")
    return found


def _in_words(command: Command) -> str:
    return " ".join(str(part) for part in command.arguments)
