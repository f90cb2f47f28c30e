"""Draws the reward and held-out success of runs: `python scripts/plot_runs.py RUN [RUN ...] --to FILE.png`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from hermes_jax.run_folder import RunFolder
from hermes_jax.telemetry.writers import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--to", required=True, type=Path)
    options = parser.parse_args()
    figure, (curves, bars) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(2, 1))
    for number, root in enumerate(options.runs):
        draw_curve(curves, root, f"C{number}")
        draw_bars(bars, root, number, len(options.runs))
    curves.set(xlabel="GRPO step", ylabel="mean reward of the step", ylim=(0, 1), title="Training reward")
    bars.set(ylabel="success", ylim=(0, 1), title="Held-out tasks", xticks=range(4))
    bars.set_xticklabels(["sampled\nbefore", "sampled\nafter", "greedy\nbefore", "greedy\nafter"], fontsize=8)
    curves.legend(frameon=False, fontsize=8)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    options.to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.to, dpi=110)


def draw_curve(axes: plt.Axes, root: Path, color: str) -> None:
    """Reward by step, as it was and smoothed over five steps."""
    rows = [row for row in read_metrics(RunFolder(root).metrics) if "train/reward" in row]
    steps, rewards = [row["step"] for row in rows], [row["train/reward"] for row in rows]
    smooth = [sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, rewards, color=color, alpha=0.25)
    axes.plot(steps, smooth, color=color, label=root.name)


def draw_bars(axes: plt.Axes, root: Path, number: int, runs: int) -> None:
    """Success on held-out tasks before and after."""
    report = json.loads(RunFolder(root).report.read_text())
    names = ("eval/success", "eval/success_greedy")
    values = [report[when][name] for name in names for when in ("before", "after")]
    width = 0.8 / runs
    places = [place - 0.4 + width * (number + 0.5) for place in range(4)]
    axes.bar(places, values, width=width, color=f"C{number}")


if __name__ == "__main__":
    main()
