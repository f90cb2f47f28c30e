"""The worker server's pool of children that run functions with a deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import uuid
from typing import Any

from hermes_jax.tools.children import Children, end_marked, end_tree
from hermes_jax.tools.frames import Channel, from_header, to_header

LOAD_TIMEOUT_S = 120.0
_KEPT_IDLE = max(2, os.cpu_count() or 1)


def module_argv(module: str, *arguments: str) -> list[str]:
    """Command line that runs `main()` of a module with this process's import path."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main()"
    return [sys.executable, "-c", code, *arguments]


class ChildDied(RuntimeError):
    """The child ended before it answered."""


class Verifier:
    """One child process; runs one call at a time."""

    def __init__(self, children: Children) -> None:
        ours, theirs = socket.socketpair()
        argv = module_argv("hermes_jax.tools.verifier_main", str(theirs.fileno()))
        # A verifier that imports jax must not take the trainer's accelerator.
        self._mark = f"HERMES_JAX_VERIFIER={uuid.uuid4().hex}"
        env = {**os.environ, "JAX_PLATFORMS": "cpu", **dict([self._mark.split("=")])}
        with theirs:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0, env=env
            )
        children.add(self.process)
        self._children = children
        self.loaded: set[str] = set()
        self._answer: asyncio.Future[tuple[dict[str, Any], bytes]] | None = None
        self._channel = Channel(ours, self._on_frame, self._on_close)
        self._channel.attach(asyncio.get_running_loop())

    @property
    def usable(self) -> bool:
        """Whether it can take another call."""
        return not self._channel.closed

    async def ask(self, fields: dict[str, Any], payload: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Sends a request and waits.

        Raises:
            TimeoutError, ChildDied: no answer. The child must be ended.
        """
        if not self.usable:
            raise ChildDied
        self._answer = asyncio.get_running_loop().create_future()
        self._channel.send(to_header(fields), payload)
        async with asyncio.timeout(timeout_s):
            return await self._answer

    async def end(self) -> int:
        """Kills the child with all it started. Returns its exit code."""
        self._channel.close()
        if self.process.returncode is None:
            end_tree(self.process.pid)
        code = await self._children.ended(self.process, kill_after_s=0.0)
        await end_marked(self._mark)
        return code

    def _on_frame(self, header: bytes, payload: bytes) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((from_header(header), payload))

    def _on_close(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ChildDied())


class VerifierPool:
    """At most `size` children; calls beyond that wait for a free one."""

    def __init__(self, size: int, children: Children) -> None:
        self._children = children
        self._free = asyncio.Semaphore(size)
        self._idle: list[Verifier] = []
        self._all: set[Verifier] = set()

    async def call(
        self, digest: str, function: bytes, arguments: bytes, timeout_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """Runs a pickled function. `timeout_s` counts from the call itself: not the wait for a child, nor imports.

        Returns:
            Fields and payload of the answer. Failures are fields too: `error`, `message`, `traceback`; a deadline is
            `{"timeout": seconds}`. Never raises for what the function does.
        """
        async with self._free:
            child = await self._take(digest)
            reusable = False
            phase, limit = "loading", LOAD_TIMEOUT_S
            try:
                answer: tuple[dict[str, Any], bytes] = {}, b""
                if digest not in child.loaded:
                    answer = await child.ask({"op": "load", "digest": digest}, function, limit)
                if "error" not in answer[0]:
                    child.loaded.add(digest)
                    phase, limit = "the call", timeout_s
                    answer = await child.ask({"op": "call", "digest": digest}, arguments, limit)
                reusable = True
                return answer
            except TimeoutError:
                return {"timeout": limit, "phase": phase}, b""
            except ChildDied:
                code = await child.end()
                return {"error": "ProcessEnded", "message": f"its process ended with {_ending(code)}"}, b""
            finally:
                await self._put_back(child, reusable)

    async def end(self) -> None:
        """Kills all children."""
        await asyncio.gather(*(child.end() for child in list(self._all)))

    @property
    def pids(self) -> list[int]:
        """Ids of the children."""
        return [child.process.pid for child in self._all]

    async def _take(self, digest: str) -> Verifier:
        for child in [child for child in self._idle if not child.usable]:
            self._idle.remove(child)
            await self._put_back(child, reusable=False)
        for child in sorted(self._idle, key=lambda child: digest not in child.loaded):
            self._idle.remove(child)
            return child
        child = Verifier(self._children)
        self._all.add(child)
        return child

    async def _put_back(self, child: Verifier, reusable: bool) -> None:
        if reusable and child.usable and len(self._idle) < _KEPT_IDLE:
            self._idle.append(child)
            return
        await asyncio.shield(child.end())
        self._all.discard(child)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
