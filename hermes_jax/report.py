"""What a run achieved: success on held-out tasks before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

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
        step: the last one.
        before, after: empty if there are no held-out tasks.
    """

    run: RunFolder
    step: int
    before: Mapping[str, float | None]
    after: Mapping[str, float | None]

    @classmethod
    def of_finished(cls, run: RunFolder, total_steps: int) -> Self | None:
        """The report of a run that ended after so many steps and still has what it left; None of any other run."""
        left = (run.report, run.final, run.checkpoints / str(total_steps))
        if not all(path.exists() for path in left):
            return None
        saved = json.loads(run.report.read_text(encoding="utf-8"))
        return cls(run, **saved) if saved.get("step") == total_steps else None

    def save(self) -> None:
        """Writes `report.json`: the last thing that a run does."""
        saved = {"step": self.step, "before": self.before, "after": self.after}
        aside = self.run.report.with_suffix(".tmp")
        aside.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
        aside.replace(self.run.report)

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
