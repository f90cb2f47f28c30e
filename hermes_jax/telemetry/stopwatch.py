"""Where a step's time goes: seconds by phase, and how much of them the device had nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PARTS: Mapping[str, tuple[str, ...]] = {"collect": ("collect",), "update": ("pack", "score", "update", "publish")}
"""Parts of a step for which idle time is told, and the phases they consist of."""


class Stopwatch:
    """Seconds by phase.

    Args:
        busy: seconds that the device thread has worked so far, as `DeviceThread.busy_s` tells.
    """

    def __init__(self, busy: Callable[[], float]) -> None:
        self._busy = busy
        self.taken: dict[str, float] = {}
        self.idle: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds what happens inside to a phase, unless it fails."""
        start, busy = time.monotonic(), self._busy()
        yield
        taken = time.monotonic() - start
        idle = min(max(taken - (self._busy() - busy), 0.0), taken)  # two clocks are read one after the other
        self.taken[phase] = self.taken.get(phase, 0.0) + taken
        self.idle[phase] = self.idle.get(phase, 0.0) + idle

    def idle_metrics(self) -> dict[str, float]:
        """Seconds and share of each part in which no call ran on the device thread."""
        metrics = {}
        for part, phases in PARTS.items():
            taken, idle = (sum(of.get(phase, 0.0) for phase in phases) for of in (self.taken, self.idle))
            metrics[f"device/{part}_idle_s"] = idle
            metrics[f"device/{part}_idle_share"] = idle / taken if taken else 0.0
        return metrics
