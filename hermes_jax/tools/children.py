"""The worker server's child processes: who has ended, and whom it adopted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from hermes_jax.tools.supervisor import descendants, kill


class Children:
    """Collects every child as soon as it ends, also orphans that this process adopted (it is their subreaper)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._known: dict[int, tuple[subprocess.Popen[bytes], asyncio.Event]] = {}
        loop.add_signal_handler(signal.SIGCHLD, self._collect)

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Watches a process. To be called before the event loop goes on after its start."""
        self._known[process.pid] = (process, asyncio.Event())

    async def ended(self, process: subprocess.Popen[bytes], kill_after_s: float) -> int:
        """Waits until a process has ended, which it is made to do after `kill_after_s`. Returns its exit code."""
        self._collect()
        entry = self._known.get(process.pid)
        if entry is not None:
            try:
                await asyncio.wait_for(entry[1].wait(), kill_after_s)
            except TimeoutError:
                self.kill(process)
                await entry[1].wait()
            self._known.pop(process.pid, None)
        return process.wait()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kills a process; not by `process.kill()`, which may collect it before `_collect` can learn of its end."""
        if process.pid in self._known and not self._known[process.pid][1].is_set():
            kill(process.pid)

    def _collect(self) -> None:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            while (child := os.waitid(os.P_ALL, 0, flags)) is not None:
                known = self._known.get(child.si_pid)
                if known is None:
                    os.waitpid(child.si_pid, 0)
                else:
                    known[0].wait()
                    known[1].set()


def end_tree(root: int) -> None:
    """Kills a process with all below it."""
    for pid in [*descendants(root), root]:
        kill(pid)


async def end_marked(mark: str) -> None:
    """Ends all processes below this one whose environment holds `mark`: also those that lost their parents."""
    marked = set()
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                marked.add(pid)
                kill(pid)
    while marked & set(descendants(os.getpid())):
        await asyncio.sleep(0.005)


def end_descendants() -> None:
    """Kills and collects everything below this process."""
    while pids := descendants(os.getpid()):
        for pid in pids:
            kill(pid)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
