"""Writes docs/metrics.md from the table of metrics."""

from pathlib import Path

from hermes_jax.telemetry.metrics import markdown

INTRODUCTION = """# Metrics

A run writes these to `metrics.jsonl` (one JSON object per line: `phase`, `step`, and the numbers) and to TensorBoard.
A name that is not in this table is an error in the program. `<part>` and the like stand for a name. What stands
under `engine/` belongs to the step's collection; evaluations are not in it.

"""

if __name__ == "__main__":
    (Path(__file__).resolve().parents[1] / "docs" / "metrics.md").write_text(INTRODUCTION + markdown())
