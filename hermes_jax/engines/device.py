"""One thread that owns every jax call, so that the event loop never waits for a device."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Submitted(Generic[T]):
    """A call handed to the device thread: `await` it in a coroutine, or `result()` outside of one.

    An exception of the call is raised in whoever awaits. Cancelling the awaiting task drops the call if it has not
    started; a call that runs is finished by the thread.
    """

    def __init__(self, future: Future[T], owner: DeviceThread) -> None:
        self._future = future
        self._owner = owner

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout_s: float | None = None) -> T:
        """Blocks until the call is done and returns its value.

        Raises:
            RuntimeError: called on the device thread itself, which would wait for itself for ever.
        """
        if self._owner.is_current() and not self._future.done():
            raise RuntimeError("a call on the device thread waits for another one: call the function directly instead")
        return self._future.result(timeout_s)


class DeviceThread:
    """Runs calls one at a time, in the order of submission, on a thread of its own.

    Learner and embedded engine share one: then an update and a decode step never compete for the device, and
    donated arrays are never used by two threads. Also a context manager that closes at its end.
    """

    def __init__(self, name: str = "device") -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=self._note_thread)
        self._closed = False
        self._lock = threading.Lock()
        self._busy = 0.0
        self._began: float | None = None

    def _note_thread(self) -> None:
        self._thread = threading.current_thread()

    def is_current(self) -> bool:
        """True on the device thread itself."""
        return threading.current_thread() is self._thread

    def submit(self, call: Callable[..., T], *args: Any) -> Submitted[T]:
        """Queues `call(*args)`.

        Raises:
            RuntimeError: the thread is closed.
        """
        if self._closed:
            raise RuntimeError(f"the device thread {self._name!r} is closed: no call can be submitted any more")
        return Submitted(self._executor.submit(self._run, call, *args), self)

    def busy_s(self) -> float:
        """Seconds spent in calls so far, the one that runs now included; the rest of the time there was none to run.

        A call that only starts work on the device and returns counts until it returns.
        """
        with self._lock:
            return self._busy + (0.0 if self._began is None else time.monotonic() - self._began)

    def _run(self, call: Callable[..., T], *args: Any) -> T:
        with self._lock:
            self._began = time.monotonic()
        try:
            return call(*args)
        finally:
            with self._lock:
                self._busy += time.monotonic() - self._began
                self._began = None

    def close(self) -> None:
        """Cancels what has not started, waits for what runs, ends the thread. Safe to call twice."""
        self._closed = True
        self._executor.shutdown(wait=not self.is_current(), cancel_futures=True)

    def __enter__(self) -> DeviceThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
