"""What /proc knows about processes, for tests that count them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from hermes_jax.tools.supervisor import descendants


def with_marker(marker: str) -> list[int]:
    """Ids of all processes of the machine (but this one) whose command line holds `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in command:
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """Ids of all processes below `pid`."""
    return descendants(pid)


def open_files(pid: int) -> int:
    """Number of open file descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def status_kib(pid: int, field: str) -> int:
    """A memory figure of /proc/PID/status, e.g. VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Waits until `holds()`, at most `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
