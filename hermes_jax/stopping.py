"""Ctrl-C and SIGTERM: end what is under way, save, and go."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The run was asked to stop; its argument is the name of the signal."""


class StopSignal:
    """Turns the first SIGINT or SIGTERM into `Stopped` at a place where the state can be saved.

    A second signal has its usual, immediate effect.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._name = ""

    def install(self) -> None:
        """Listens on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def remove(self) -> None:
        """Gives both signals their usual effect back."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

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

    def _on_signal(self, number: int) -> None:
        self._name = signal.Signals(number).name
        self._event.set()
        self.remove()
