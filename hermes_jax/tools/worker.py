"""The trainer's side of the worker server, which runs sandboxes and functions in processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

import cloudpickle

from hermes_jax.tools.frames import Channel, from_header, to_header
from hermes_jax.tools.verifier_main import digest
from hermes_jax.tools.verifiers import module_argv

T = TypeVar("T")


class WorkerServerDied(RuntimeError):
    """The worker server has ended: no sandbox and no reward function runs any more."""


class CallFailed(RuntimeError):
    """A function that ran in the worker server raised, crashed or returned what cannot be sent.

    Attributes:
        error: name of the exception's type.
        message: its text.
        trace: its traceback, for the log.
    """

    def __init__(self, error: str, message: str, trace: str = "") -> None:
        super().__init__(f"{error}: {message}" if message else error)
        self.error, self.message, self.trace = error, message, trace


class CallTimedOut(RuntimeError):
    """A function did not end within its deadline; its process was killed."""


@dataclass(frozen=True)
class Prepared:
    """A function in the form in which it travels."""

    name: str
    pickled: bytes
    digest: str


def prepare(function: Callable[..., Any], name: str = "") -> Prepared:
    """Pickles a function once for many calls; lambdas, closures and functions of `__main__` go by value.

    Raises:
        TypeError: it holds something that cannot be pickled.
    """
    name = name or getattr(function, "__name__", type(function).__name__)
    pickled = _pickle(function, f"function {name!r}")
    return Prepared(name, pickled, digest(pickled))


def _seen(future: asyncio.Future[Any]) -> None:
    """Marks a failure as seen, for requests whose answer nobody waits for."""
    if not future.cancelled():
        future.exception()


def _pickle(value: Any, what: str) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"{what} cannot be sent to the worker server: {error}") from error
    return pickled


class WorkerServer:
    """A server process that belongs to this process and ends with it, however it ends.

    Start it before jax is imported. It is used from one event loop at a time. Use as a context manager or `close` it.
    """

    def __init__(self, *, max_calls: int = 16) -> None:
        """Starts the process (some 100 ms until it answers; nothing waits for that).

        Args:
            max_calls: so many functions run at once, each in a process of its own.
        """
        ours, theirs = socket.socketpair()
        arguments = (str(theirs.fileno()), str(os.getpid()), str(max_calls))
        with theirs:
            self._process = subprocess.Popen(
                module_argv("hermes_jax.tools.worker_main", *arguments),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._ids = count(1)
        self._guards: set[asyncio.Event] = set()
        self._channel = Channel(ours, self._on_frame, self._on_close)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    async def request(self, op: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Sends a request and waits for its answer.

        Raises:
            WorkerServerDied: the server has ended, before or meanwhile.
        """
        number, future = self.submit(op, payload, **fields)
        try:
            return await future
        except asyncio.CancelledError:
            self._channel.send(to_header({"id": 0, "op": "cancel", "request": number}))
            raise
        finally:
            self._waiting.pop(number, None)

    def submit(
        self, op: str, payload: bytes = b"", **fields: Any
    ) -> tuple[int, asyncio.Future[tuple[dict[str, Any], bytes]]]:
        """Sends a request at once. Returns its number and the future of its answer."""
        loop = self._attach()
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = loop.create_future()
        future.add_done_callback(_seen)
        number = next(self._ids)
        if self._channel.closed:
            future.set_exception(self._death())
            return number, future
        self._waiting[number] = future
        self._channel.send(to_header({"id": number, "op": op, **fields}), payload)
        return number, future

    async def call(self, function: Callable[..., Any] | Prepared, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Runs a function (or coroutine function) in another process and returns its result, which is plain data.

        Calls run side by side. At `timeout_s` after the function's start its process is killed, with all it started.

        Raises:
            CallTimedOut, CallFailed, WorkerServerDied, TypeError (what cannot be pickled).
        """
        prepared = function if isinstance(function, Prepared) else prepare(function)
        arguments = _pickle((args, kwargs), f"arguments of {prepared.name!r}")
        fields, result = await self.request(
            "call",
            prepared.pickled + arguments,
            digest=prepared.digest,
            function_bytes=len(prepared.pickled),
            timeout_s=timeout_s,
        )
        if "timeout" in fields:
            raise CallTimedOut(f"{fields['phase']} did not end within {fields['timeout']:g} s")
        if "error" in fields:
            raise CallFailed(fields["error"], fields["message"], fields.get("traceback", ""))
        return json.loads(result)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, but cancels it (and waits for its clean-up) when the server ends meanwhile.

        Without the server no episode can be played or rewarded any more, whatever the episodes make of that.

        Raises:
            WorkerServerDied: the server has ended, before or meanwhile.
        """
        self._attach()
        gone = asyncio.Event()
        self._guards.add(gone)
        task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(gone.wait())
        try:
            if not self._channel.closed:
                await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if self._channel.closed:
                raise self._death()
            return task.result()
        finally:
            self._guards.discard(gone)
            waiter.cancel()
            task.cancel()
            await asyncio.wait({task})
            _seen(task)

    def close(self, timeout_s: float = 15.0) -> None:
        """Ends the server and all it started; waits for that (usually some 10 ms). Can be called again."""
        self._channel.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._fail_waiting()

    def __enter__(self) -> WorkerServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_frame(self, header: bytes, payload: bytes) -> None:
        fields = from_header(header)
        future = self._waiting.pop(fields["id"], None)
        if future is not None and not future.done():
            future.set_result((fields, payload))

    def _on_close(self) -> None:
        self._fail_waiting()
        for gone in self._guards:
            gone.set()

    def _attach(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._channel.loop is not loop:
            self._waiting.clear()  # they belonged to a loop that has ended
            self._channel.attach(loop)
        return loop

    def _fail_waiting(self) -> None:
        for future in self._waiting.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(self._death())
        self._waiting.clear()

    def _death(self) -> WorkerServerDied:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # its socket closes a moment before it can be collected
        code = self._process.poll()
        ending = "was closed" if code == 0 else f"ended with exit code {code}" if code is not None else "has gone"
        return WorkerServerDied(
            f"the worker server (process {self.pid}) {ending}; sandboxes and reward functions cannot run without it: "
            "start the run again (with --resume)"
        )
