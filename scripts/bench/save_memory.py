"""Peak memory of updates on SmolLM2-135M, with and without a checkpoint that is written beside them; prints JSON.

    python scripts/bench/save_memory.py --rounds 1

Each side is a process of its own: it makes two updates, saves (or does not) as the trainer does, makes two more updates
as soon as it may, waits for the disk, and looks at its peak memory. The state is that of training: fp32 parameters and
both moments. `ratio` is the peak with a save by the peak without one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import processes

TEMPORARY = processes.REPOSITORY / "runs"


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="processes of each side, in turn")
    parser.add_argument("--rows", type=int, default=4, help="sequences of an update")
    parser.add_argument("--width", type=int, default=512, help="tokens of each")
    parser.add_argument("--model", type=Path, default=processes.REPOSITORY / "models" / "smollm2", help="HF folder")
    parser.add_argument("--folder", type=Path, default=TEMPORARY, help="the checkpoint is written to a new one in it")
    parser.add_argument("--copies", action="store_true", help="as if updates came at once: the state is copied")
    parser.add_argument("--measure", choices=("with", "without"), help="one side, in this process")
    options = parser.parse_args()
    return processes.main(lambda: measure(options) if options.measure else compare(options))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Runs both sides in turn."""
    own = sys.argv[1:]
    commands = {side: processes.ours("save_memory.py", *own, "--measure", side) for side in ("without", "with")}
    runs = processes.alternate(commands, options.rounds)
    sides = {f"{side}_save": processes.side(found, "peak_gib") for side, found in runs.items()}
    ratio = sides["with_save"]["peak_gib"] / sides["without_save"]["peak_gib"]
    return processes.report("save_memory", **sides, ratio=ratio)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Updates of the trainer's own learner, with its own checkpoints."""
    from hermes_jax.host_memory import reuse_freed_memory
    from hermes_jax.quiet import quiet_libraries

    reuse_freed_memory()
    quiet_libraries()
    import jax

    from hermes_jax.assembly import grpo_phase, open_mesh, read_policy
    from hermes_jax.config import load
    from hermes_jax.data.buckets import Buckets
    from hermes_jax.data.packing import pack
    from hermes_jax.learner.checkpoint import Checkpoints
    from hermes_jax.learning import Learning

    config = load(overrides=_overrides(options))
    policy = read_policy(options.model)
    mesh = open_mesh(config, policy)
    phase = grpo_phase(config, policy, mesh)
    learning = Learning(config, policy, mesh)
    learning.begin(phase, learning.load(options.model))
    shape = (options.rows // 2, 2, options.width)
    batch, _ = pack(_sequences(options, policy.config.vocab_size), Buckets((shape,)))
    result: dict[str, Any] = {"shape": list(shape)}

    def updates() -> float:
        began = time.perf_counter()
        for _ in range(2):
            jax.block_until_ready(learning.imitate(phase, batch))
        return time.perf_counter() - began

    updates()
    result["peak_before_gib"] = processes.own_peak_rss() / processes.GIB
    result["state_gib"] = sum(leaf.nbytes for leaf in jax.tree.leaves(learning.state)) / processes.GIB
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoints = Checkpoints(folder, copies=options.copies)
        began = time.perf_counter()
        if options.measure == "with":
            checkpoints.save(1, learning.state, {"step": 1})
        result["save_s"] = time.perf_counter() - began
        began = time.perf_counter()
        checkpoints.wait_for_arrays()  # as the trainer does before an update, there with a collection in between
        result["wait_for_arrays_s"] = time.perf_counter() - began
        result["updates_s"] = updates()
        began = time.perf_counter()
        checkpoints.close()
        result["wait_s"] = time.perf_counter() - began
    result["peak_gib"] = processes.own_peak_rss() / processes.GIB
    return result


def _overrides(options: argparse.Namespace) -> list[str]:
    return [
        f"model.path={options.model}",
        f"model.context_length={options.width}",
        f"env.max_token_length={options.width - 1}",
        f"learner.micro_tokens={2 * options.width}",
        "learner.remat=true",
        "grpo.head_chunk=512",
        "env.terminal_backend=local",  # nothing is run
    ]


def _sequences(options: argparse.Namespace, vocab: int) -> list[Any]:
    import numpy as np

    from hermes_jax.data.packing import TrainingSequence
    from hermes_jax.data.trajectory import Trajectory

    width, sampled = options.width, np.arange(options.width) >= options.width // 8
    random = np.random.default_rng(0)
    trajectories = [
        Trajectory(
            tokens=random.integers(10, vocab, width),
            mask=sampled,
            logprobs=np.where(sampled, -1.0, 0.0),
            temperature=np.ones(width),
            policy_version=np.where(sampled, 0, -1),
            turn=np.where(sampled, 0, -1),
        )
        for _ in range(options.rows)
    ]
    return [TrainingSequence(trajectory, 1.0 if n % 2 else -1.0, group=n) for n, trajectory in enumerate(trajectories)]


if __name__ == "__main__":
    sys.exit(main())
