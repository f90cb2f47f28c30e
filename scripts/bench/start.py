"""From the start of `hermes_jax.train` to its first step, without and with programs that an earlier start kept; JSON.

    python scripts/bench/start.py                                            (configs/quickstart.yaml)
    python scripts/bench/start.py --config configs/smollm2_terminal.yaml
    python scripts/bench/start.py --set openai.slots=8

Both starts are whole processes, ended by themselves after one step, with a new folder for compiled programs; warm start
and evaluations are left out. `reached_s` tells when, after the start of the process, its parts were open (libraries
imported, environment and tokenizer read), all was loaded and compiled (the first step begins), and the step was done.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import processes

MARKS = {"run folder: ": "parts_open", "objective: ": "first_step_begins", "train 1/1 ": "first_step_done"}
"""Beginnings of lines that the command prints."""
LIMIT_S = 900.0
LEFT_OUT = ("env.total_steps=1", "env.eval_episodes=0", "warm_start.steps=0", "logging.progress=plain")


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=processes.REPOSITORY / "configs" / "quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any option of the config")
    parser.add_argument("--starts", type=int, default=2, help="starts in turn; only the first finds no programs")
    options = parser.parse_args()
    return processes.main(lambda: compare(options))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Starts one after the other."""
    runs = processes.REPOSITORY / "runs"
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as scratch:
        found = [start(options, Path(scratch), number) for number in range(options.starts)]
        kept = [file for file in (Path(scratch) / "compiled").rglob("*") if file.is_file()]
        programs = {"files": len(kept), "bytes": sum(file.stat().st_size for file in kept)}
    return processes.report("start", config=options.config.name, cold=found[0], again=found[1:], programs=programs)


def start(options: argparse.Namespace, scratch: Path, number: int) -> dict[str, Any]:
    """One run of one step.

    Raises:
        BenchError: it failed or took too long; with the end of what it printed.
    """
    run, load, began = scratch / f"run{number}", os.getloadavg()[0], time.perf_counter()
    arguments = [*LEFT_OUT, f"run_dir={run}", f"compilation_cache={scratch / 'compiled'}", *options.set]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "hermes_jax.train", "--config", options.config.resolve(), *arguments],
            cwd=processes.REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(processes.REPOSITORY), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        reached: dict[str, float] = {}
        assert process.stdout is not None
        for line in process.stdout:
            at = time.perf_counter() - began
            reached |= {name: at for beginning, name in MARKS.items() if line.startswith(beginning)}
        status = process.wait()
        timer.cancel()
        errors.seek(0)
        if status or len(reached) < len(MARKS):
            raise processes.BenchError(f"the run ended with status {status}:\n{errors.read()[-2000:]}")
    return {"seconds_to_first_step": reached["first_step_begins"], "reached_s": reached, **_step(run), "load": load}


def _step(run: Path) -> dict[str, Any]:
    """What the run wrote down about its step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step = {name: value for row in rows if row["step"] == 1 for name, value in row.items()}
    phases = ("collect", "pack", "score", "update", "publish", "episodes", "checkpoint")
    return {
        "first_step_s": {phase: step.get(f"seconds/{phase}", 0.0) for phase in phases},
        "compilations": step["system/compilations"],
        "compile_s": step["system/compile_s"],
    }


if __name__ == "__main__":
    sys.exit(main())
