"""The worker server: a small process that starts sandboxes and runs functions on behalf of the trainer.

The trainer itself never forks once jax runs. This process imports neither jax nor numpy, belongs to a session of its
own (Ctrl-C reaches the trainer only), and ends everything it started when the trainer's end of the socket closes,
also by `kill -9`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from hermes_jax.tools.backends import SandboxSettings
from hermes_jax.tools.children import Children, end_descendants
from hermes_jax.tools.frames import Channel, from_header, to_header
from hermes_jax.tools.sandbox_process import SandboxProcess
from hermes_jax.tools.verifiers import VerifierPool

_PR_SET_CHILD_SUBREAPER = 36
NICENESS = 5
"""Of all commands and reward functions: a burst of them must not keep the trainer's event loop from its turn."""


class Server:
    """Serves one trainer until it goes away."""

    def __init__(self, sock: socket.socket, owner: int, max_calls: int) -> None:
        self._sandboxes: dict[int, SandboxProcess] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._children = Children(loop)
        self._pool = VerifierPool(max_calls, self._children)
        self._channel = Channel(sock, self._on_frame, self._gone.set)
        self._channel.attach(loop)
        self._watch_owner(loop, owner)

    async def run(self) -> None:
        """Serves, then ends all that was started."""
        await self._gone.wait()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(self._pool.end(), *(box.end() for box in self._sandboxes.values()), return_exceptions=True)
        end_descendants()

    def _watch_owner(self, loop: asyncio.AbstractEventLoop, owner: int) -> None:
        """The socket alone does not tell when a forked copy of the trainer holds it open."""
        try:
            fd = os.pidfd_open(owner)
        except ProcessLookupError:
            self._gone.set()
        except OSError:
            return  # a kernel before 5.3
        else:
            loop.add_reader(fd, self._owner_ended, fd)

    def _owner_ended(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._gone.set()

    def _on_frame(self, header: bytes, payload: bytes) -> None:
        fields = from_header(header)
        request: int = fields["id"]
        match fields["op"]:
            case "ping":
                self._answer(request, {"sandboxes": len(self._sandboxes), "calls": len(self._tasks)})
            case "open":
                self._open(request, fields["settings"])
            case "ask":
                self._ask(request, fields, payload)
            case "end":
                self._start(request, self._end(request, fields["sandbox"]))
            case "call":
                self._start(request, self._call(request, fields, payload))
            case "cancel":
                if task := self._tasks.get(fields["request"]):
                    task.cancel()

    def _answer(self, request: int, fields: dict[str, Any], payload: bytes = b"") -> None:
        self._channel.send(to_header({"id": request, **fields}), payload)

    def _start(self, request: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[request] = task
        task.add_done_callback(lambda _: self._tasks.pop(request, None))

    def _open(self, request: int, settings: dict[str, Any]) -> None:
        def ready(words: str, payload: bytes) -> None:
            self._answer(request, {"words": words}, payload)

        try:
            self._sandboxes[request] = SandboxProcess(SandboxSettings(**settings), self._children, ready)
        except (OSError, ValueError) as error:
            self._answer(request, {"words": "lost"}, f"the sandbox does not start: {error}".encode())

    def _ask(self, request: int, fields: dict[str, Any], payload: bytes) -> None:
        def answer(words: str, content: bytes) -> None:
            self._answer(request, {"words": words}, content)

        box = self._sandboxes.get(fields["sandbox"])
        if box is None:
            answer("lost", b"the sandbox was ended")
        else:
            box.ask(fields["words"], payload, fields["seconds"], answer)

    async def _end(self, request: int, sandbox: int) -> None:
        if box := self._sandboxes.pop(sandbox, None):
            await box.end()
        self._answer(request, {})

    async def _call(self, request: int, fields: dict[str, Any], payload: bytes) -> None:
        function, arguments = payload[: fields["function_bytes"]], payload[fields["function_bytes"] :]
        answer, result = await self._pool.call(fields["digest"], function, arguments, fields["timeout_s"])
        self._answer(request, answer, result)


def _yield_to_the_trainer() -> None:
    """Lowers the priority of this process and of all that it starts.

    Linux may share the processors among sessions before it looks at the priority of processes, so the session's own is
    lowered as well, and sandboxes are no sessions but process groups: the session has no terminal they could reach.
    """
    os.nice(NICENESS)
    with suppress(OSError):  # no such file where sessions are not grouped
        Path("/proc/self/autogroup").write_text(str(NICENESS))


async def _serve(fd: int, owner: int, max_calls: int) -> None:
    await Server(socket.socket(fileno=fd), owner, max_calls).run()


def main() -> None:
    """Arguments: descriptor of the socket, process id of the trainer, how many functions run at once."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends when the trainer has gone, not before
        signal.signal(number, lambda *_: None)  # a handler, because children would inherit SIG_IGN
    _yield_to_the_trainer()
    fd, owner, max_calls = map(int, sys.argv[1:])
    os.set_inheritable(fd, False)
    asyncio.run(_serve(fd, owner, max_calls))


if __name__ == "__main__":
    main()
