"""One sandbox as the worker server sees it: a process, a channel to its supervisor, and deadlines."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hermes_jax.tools.backends import BACKENDS, SandboxSettings
from hermes_jax.tools.children import Children, end_marked
from hermes_jax.tools.frames import Channel

Answer = Callable[[str, bytes], None]  # header words and payload; words "lost" + why if the sandbox is gone
_MAX_ANSWER_BYTES = 128 << 20  # a supervisor that fell into wrong hands must not fill this process's memory
_LOG_BYTES = 2000


@dataclass
class _Request:
    answer: Answer
    deadline: asyncio.TimerHandle


class SandboxProcess:
    """Starts at once; `ask` may be called right away, requests are answered in order."""

    def __init__(self, settings: SandboxSettings, children: Children, on_ready: Answer) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._children = children
        self._requests: deque[_Request] = deque()
        self._lost_because: str | None = None
        self._log: int | None = os.memfd_create("sandbox-log")
        self._launch = BACKENDS[settings.backend](settings)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = self._launch.start(theirs, self._log)
        except OSError:
            ours.close()
            self._close_log()
            raise
        self._children.add(self._process)
        self._channel = Channel(ours, self._on_frame, self._on_close, _MAX_ANSWER_BYTES)
        self._channel.attach(self._loop)
        self._expect(on_ready, settings.start_timeout_s)

    def ask(self, words: str, payload: bytes, seconds: float, answer: Answer) -> None:
        """Sends a request; `answer` is called with the reply, or with "lost" when there is none within `seconds`."""
        if self._lost_because is not None:
            answer("lost", self._lost_because.encode())
            return
        self._expect(answer, seconds + self._settings.grace_s)
        self._channel.send(words.encode(), payload)

    async def end(self) -> None:
        """Ends every process of the sandbox and removes what it left. Can be called again."""
        self._lose("the sandbox was ended")
        self._channel.close()  # the supervisor exits at the end of its channel, and all processes with it
        await self._children.ended(self._process, 5.0)
        self._close_log()
        if self._launch.workspace is not None:  # a command may have killed a supervisor that no namespace protects
            await end_marked(self._launch.workspace)
        self._launch.remove_workspace()

    def _expect(self, answer: Answer, seconds: float) -> None:
        deadline = self._loop.call_later(seconds, self._on_deadline, seconds)
        self._requests.append(_Request(answer, deadline))

    def _on_frame(self, header: bytes, payload: bytes) -> None:
        if self._requests:
            request = self._requests.popleft()
            request.deadline.cancel()
            request.answer(header.decode(errors="replace"), payload)

    def _on_deadline(self, seconds: float) -> None:
        self._children.kill(self._process)
        self._channel.close()
        self._lose(f"the sandbox did not answer within {seconds:g} s and was ended")

    def _on_close(self) -> None:
        printed = os.pread(self._log, _LOG_BYTES, 0).decode(errors="replace").strip() if self._log is not None else ""
        self._lose("the sandbox ended by itself" + (f": {printed}" if printed else ""))

    def _lose(self, why: str) -> None:
        if self._lost_because is None:
            self._lost_because = why
        for request in list(self._requests):
            request.deadline.cancel()
            request.answer("lost", self._lost_because.encode())
        self._requests.clear()

    def _close_log(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None
