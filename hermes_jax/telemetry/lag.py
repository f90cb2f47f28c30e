"""How late the event loop is: what blocks it delays every episode, tool and deadline."""

from __future__ import annotations

import asyncio


class LoopLag:
    """Measures the loop it is started on.

    A timer asks to be called every `interval_s`; how much later it is called is the lag.

    Args:
        interval_s: between two looks (s); shorter blocks than this are seen with luck only.
    """

    def __init__(self, interval_s: float = 0.01) -> None:
        self._interval = interval_s
        self._worst = 0.0
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts on the running loop."""
        self.stop()
        self._loop = asyncio.get_running_loop()
        self._schedule()

    def stop(self) -> None:
        """Stops; `take` still gives the last value."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def take(self) -> float:
        """The worst lag since the last call (s), a delay that is still going on included."""
        if self._timer is not None:
            self._look()
        worst, self._worst = self._worst, 0.0
        return worst

    def _schedule(self) -> None:
        assert self._loop is not None
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self._look()
        self._schedule()

    def _look(self) -> None:
        assert self._loop is not None
        self._worst = max(self._worst, self._loop.time() - self._due)
