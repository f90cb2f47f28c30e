"""Whole training steps on a toy task with SmolLM2-135M in fp32, ours beside TRL's; prints one JSON object.

    python scripts/bench/end_to_end.py --peer trl

A step: 4 prompts "Reply with a number larger than N." x 4 replies of up to 64 tokens, one update on all of them. Same
prompts, chat template, reward function and sampling (temperature 1, nothing cut off) on both sides, beta 0. Ours is the
trainer itself, `hermes_jax.train`; `learn_s` is everything of a step but the collection. The first step compiles and is
not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import processes
import toy_task

HERE = Path(__file__).resolve().parent
LEARN = ("pack", "score", "update", "publish")


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("none", "trl"), default="none")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each process")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="ours: any option of a config")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each side, in turn")
    parser.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--peer-micro", type=int, default=16, help="sequences of a peer's micro-batch")
    parser.add_argument("--model", type=Path, default=processes.REPOSITORY / "models" / "smollm2", help="HF folder")
    parser.add_argument("--measure", action="store_true", help="our side only, in this process")
    options = parser.parse_args()
    return processes.main(lambda: measure(options) if options.measure else compare(options))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the sides in turn."""
    commands = {"ours": processes.ours("end_to_end.py", *sys.argv[1:], "--measure")}
    if options.peer == "trl":
        arguments = ["end_to_end", "--model", str(options.model), "--dtype", options.peer_dtype]
        arguments += ["--micro", str(options.peer_micro), "--steps", str(options.steps)]
        commands["trl"] = processes.peer("trl", "peer_trl.py", *arguments)
    runs = processes.alternate(commands, options.rounds)
    sides = {name: processes.side(found, "step_s") for name, found in runs.items()}
    task = {"prompts": toy_task.PROMPTS, "replies": toy_task.REPLIES, "new_tokens": toy_task.NEW_TOKENS}
    report = processes.report("end_to_end", task=task, **sides)
    if options.peer == "trl":
        report["ratio_step"] = sides["trl"]["step_s"] / sides["ours"]["step_s"]
    return report


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Our side: a run of the trainer in a folder that is thrown away, and the seconds that it logged."""
    import envs

    envs.__path__.append(os.fspath(HERE / "envs"))
    from hermes_jax.train import main as train

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(_config(options, run)))
        status = train(["--config", os.fspath(config), *options.set])
        if status:
            raise processes.BenchError(f"the run ended with status {status}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return _figures(rows, options.steps) | {"peak_rss_gib": processes.own_peak_rss() / processes.GIB}


def _config(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    return {
        "run_dir": os.fspath(run),
        "model": {"path": os.fspath(options.model), "context_length": 128},
        "env": {
            "name": "larger_number",
            "enabled_toolsets": [],
            "max_agent_turns": 1,
            "max_token_length": toy_task.NEW_TOKENS,
            "group_size": toy_task.REPLIES,
            "groups_per_step": toy_task.PROMPTS,
            "total_steps": 1 + options.steps,
            "steps_per_eval": 0,
            "eval_episodes": 0,
            "terminal_backend": "local",  # nothing is run: there are no tools
        },
        "openai": {"slots": toy_task.PROMPTS * toy_task.REPLIES, "prefill_chunk": 64},
        "grpo": {"temperature": toy_task.TEMPERATURE, "iterations_per_batch": 1, "head_chunk": 512},
        "learner": {"micro_tokens": 2048},
        "checkpoint": {"every_steps": 0},
        "logging": {"progress": "none", "tensorboard": False},
    }


def _figures(rows: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    found = [merged[number] for number in sorted(merged) if "seconds/step" in merged[number]][-steps:]
    best = min(found, key=lambda row: row["seconds/step"])
    replies = toy_task.PROMPTS * toy_task.REPLIES
    parts = {name: best.get(f"seconds/{name}", 0.0) for name in ("collect", *LEARN)}
    return {
        "step_s": best["seconds/step"],
        "generate_s": parts["collect"],
        "learn_s": best["seconds/step"] - parts["collect"],
        "parts_s": parts,
        "steps_s": [row["seconds/step"] for row in found],
        "generated_tokens": [round(row["train/response_tokens"] * replies) for row in found],
        "reward": [row["train/reward"] for row in found],
        "groups_constant": [row["groups/constant"] for row in found],
        "reward_missing": [row["train/reward_missing"] for row in found],
        "replies_per_step": replies,
    }


if __name__ == "__main__":
    sys.exit(main())
