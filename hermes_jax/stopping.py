"""Ctrl-C and SIGTERM: end what is under way, save, and go; within seconds, unless it is worth waiting for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STATUS = 130
"""Exit status of a command that a signal stopped."""
PATIENCE_S = 11.0
"""Longest time between a signal and the end; what is worth waiting for does not count."""
SILENT_S = 1.0
"""After so long a wait it is said what for."""
AGAIN = "ended at once, as a signal came again"

T = TypeVar("T")


class Stopped(Exception):
    """The run was asked to stop; its argument is the name of the signal."""


class StopSignal:
    """Turns the first SIGINT or SIGTERM into `Stopped` at a place where the state can be saved.

    A second signal ends the process at once. So does a thread when the first one has no effect for PATIENCE_S, as a
    compilation can't be interrupted and a reward function may hang; but for an update and for saving it waits
    (`waits_for`).

    Args:
        last_words: what is saved and how to go on, to be printed then.
    """

    def __init__(self, last_words: Callable[[], str]) -> None:
        self._last_words, self._patience_s = last_words, PATIENCE_S
        self._event = asyncio.Event()
        self._name = ""
        self._before: dict[int, Any] = {}
        self._waiting_since = 0.0
        self._awaited, self._over = "", False

    def install(self) -> None:
        """Listens on the running loop, which must be that of the main thread."""
        loop = asyncio.get_running_loop()
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_first, number)

    def remove(self) -> None:
        """Gives both signals the effect that they had before; the process is no longer ended from here."""
        self._over = True
        self._forget()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def came(self) -> bool:
        """Whether a signal came."""
        return self._event.is_set()

    def check(self) -> None:
        """Raises Stopped if a signal came."""
        if self._event.is_set():
            raise Stopped(self._name)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, but cancels it (and waits for its clean-up) when a signal comes; raises Stopped then."""
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()
            self.check()
            return task.result()
        finally:
            task.cancel()
            waiter.cancel()

    @contextmanager
    def waits_for(self, what: str) -> Iterator[None]:
        """What happens inside may take as long as it takes, and a person who waits is told what for.

        An update can't be broken off without losing all steps since the last checkpoint, a checkpoint not without
        losing itself.
        """
        before, self._awaited = self._awaited, what
        try:
            yield
        finally:
            self._awaited, self._waiting_since = before, time.monotonic()

    def _forget(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def _on_first(self, number: int) -> None:
        if self._event.is_set():  # both came before the loop looked
            self._end(AGAIN)
        self._name = signal.Signals(number).name
        self._event.set()
        self._forget()
        for each in SIGNALS:
            signal.signal(each, lambda *_: self._end(AGAIN))
        self._waiting_since = time.monotonic()
        threading.Thread(target=self._watch, name="stop", daemon=True).start()

    def _watch(self) -> None:
        came, said = time.monotonic(), ""
        while (awaited := self._awaited) or time.monotonic() - self._waiting_since < self._patience_s:
            if self._over:
                return
            if awaited not in ("", said) and time.monotonic() - came > SILENT_S:
                said = awaited
                print(f"{self._name}: waiting for {said}; a second signal ends at once", file=sys.stderr, flush=True)
            time.sleep(0.05)
        self._end(f"ended by force, as something did not stop within {self._patience_s:g} s")

    def _end(self, how: str) -> None:
        """Ends the process without any clean-up; the worker server sees that and ends the sandboxes."""
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a live display may have hidden it
        os.write(2, f"{show_cursor}\n{self._name}: {how}; {self._last_words()}\n".encode())
        os._exit(STATUS)
