"""What a run achieved: success on held-out tasks before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from hermes_jax.run_folder import RunFolder

_ROWS = {
    "success, sampled": "eval/success",
    "success, greedy": "eval/success_greedy",
    "reward, sampled": "eval/reward",
    "reward, greedy": "eval/reward_greedy",
}


@dataclass(frozen=True)
class Report:
    """Evaluations before the first and after the last step, under their documented names.

    Args:
        run: where the run's files are.
        before, after: empty if there are no held-out tasks.
    """

    run: RunFolder
    before: Mapping[str, float | None]
    after: Mapping[str, float | None]

    def save(self) -> None:
        """Writes `report.json`."""
        self.run.report.write_text(json.dumps({"before": self.before, "after": self.after}, indent=2) + "\n")

    def print(self, console: Console | None = None) -> None:
        """The table, and where the files are."""
        console = console or Console(highlight=False)
        if self.after:
            episodes = int(self.after["eval/episodes"] or 0) // 2
            table = Table(title=f"{episodes} held-out tasks", title_justify="left")
            for heading in ("", "before", "after"):
                table.add_column(heading, justify="left" if not heading else "right")
            for label, name in _ROWS.items():
                table.add_row(label, _number(self.before.get(name)), _number(self.after.get(name)))
            console.print(table)
        for label, path in (("metrics", self.run.metrics), ("episodes", self.run.episodes), ("model", self.run.final)):
            console.print(f"{label:>8}: {path}", soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
