"""Runs a script of `scripts/bench/` as a user does, on a model small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent
QUICK_COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def bench(script: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess:
    """The finished process."""
    return subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "bench" / script, *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_COMPILER, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def figures(script: str, *arguments: str | Path) -> dict[str, Any]:
    """The one JSON object that the script prints."""
    done = bench(script, *arguments)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def is_running(pid: int) -> bool:
    """Whether a process still runs; one that waits to be collected by whoever inherited it does not."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True
