"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.table import Table

COLUMNS = {
    "reward": ("train/reward",),
    "success": ("train/success",),
    "KL": ("update/kl_ref_k3", "update/kl_mean"),
    "loss": ("warm_start/loss",),
    "tok/s": ("speed/generated_tokens_per_s", "warm_start/trained_tokens_per_s"),
    "eval": ("eval/success",),
}
"""Heading -> the metrics that may stand under it; the first one that is there does."""
RECENT = 20
"""Updates of the display from which the time left is estimated."""


class Progress:
    """Progress of a run.

    Args:
        mode: "live" (redrawn in place), "plain" (a line per step), "none", or "auto": live on a terminal, else plain.
        file: where to; None = standard output.
        now: seconds; tests replace it.
        every_s: plain lines are at least this far apart, the last step of a phase excepted (s).
    """

    def __init__(
        self,
        mode: str = "auto",
        *,
        file: IO[str] | None = None,
        now: Callable[[], float] = time.monotonic,
        every_s: float = 0.0,
    ) -> None:
        terminal = (file or sys.stdout).isatty()
        self._console = Console(file=file, highlight=False, emoji=False, force_terminal=terminal)
        if mode == "auto":
            mode = "live" if terminal else "plain"
        self._mode = mode
        self._now = now
        self._every = every_s
        self._live: Live | None = None
        self._phase, self._total, self._step = "", 0, 0
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._printed = float("-inf")
        self._values: dict[str, float] = {}
        self._note = ""

    def start(self, phase: str, total: int, step: int = 0) -> None:
        """Begins a phase of `total` steps of which `step` are done."""
        self._phase, self._total, self._step = phase, total, step
        self._last, self._printed = None, float("-inf")
        self._recent.clear()
        self._values, self._note = {}, ""
        if self._mode == "live" and self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        self._redraw()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Shows that `step` steps are done, with their metrics; earlier ones stay until they are replaced."""
        self._measure(step)
        self._step = step
        self._values.update(values)
        self._note = ""
        if self._mode == "plain" and (step >= self._total or self._now() - self._printed >= self._every):
            self._printed = self._now()
            self._console.print(self.line(), soft_wrap=True, markup=False)
        self._redraw()

    def note(self, text: str) -> None:
        """Says what is going on inside a step ("collecting 12 of 64"); live display only."""
        self._note = text
        self._redraw()

    def print(self, text: str) -> None:
        """Prints a line of its own, above the live display."""
        if self._mode != "none":
            self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Ends the live display; the last state stays on the screen."""
        if self._live is not None:
            self._live.stop()
        self._live = None

    def line(self) -> str:
        """The state in one line."""
        cells = [f"{self._phase} {self._step}/{self._total}", *(f"{name} {text}" for name, text in self._cells())]
        return "  ".join(cells + ([self._note] if self._note else []))

    def seconds_left(self) -> float | None:
        """Time until the phase ends at the median speed of late (s).

        None until two updates came: the steps of the first one compiled what all others use.
        """
        return median(self._recent) * (self._total - self._step) if self._recent else None

    def _measure(self, step: int) -> None:
        """Takes the time per step since the last update."""
        now, done = self._now(), step - self._step
        if self._last is not None and done > 0:
            self._recent.append((now - self._last) / done)
        self._last = now

    def _cells(self) -> list[tuple[str, str]]:
        cells = []
        for heading, names in COLUMNS.items():
            value = next((self._values[name] for name in names if name in self._values), None)
            if value is not None:
                cells.append((heading, f"{value:,.0f}" if heading == "tok/s" else f"{value:.3f}"))
        left = self.seconds_left()
        return [*cells, ("left", duration(left))] if left is not None else cells

    def _redraw(self) -> None:
        if self._live is None:
            return
        table = Table(box=None, pad_edge=False)
        cells = [(self._phase, f"{self._step}/{self._total}"), *self._cells(), ("", self._note)]
        for heading, _ in cells:
            table.add_column(heading, style="bold" if heading == self._phase else None)
        table.add_row(*(text for _, text in cells))
        self._live.update(table, refresh=True)


def duration(seconds: float) -> str:
    """`45s`, `3m05s`, `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
