"""One GRPO update on SmolLM2-135M in fp32, ours beside TRL's or Tunix's; prints one JSON object.

    python scripts/bench/learner.py --case full --peer trl
    python scripts/bench/learner.py --case variable --peer none --remat on --set learner.micro_tokens=4096

`full`: 8 sequences of 512 tokens. `variable`: 32 sequences of 10,228 tokens in all, the longest 1,024 (their lengths
are in the output). The first eighth of each sequence is its prompt. Each side runs in processes of its own, in turn
with the other. Seconds are those of one update after the one that compiles and warms up; tokens are real ones, padding
does not count. For `variable` a peer runs one padded micro-batch, and its time is scaled; the output says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import processes
from cases import Case, make_case


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("full", "variable"), default="full")
    parser.add_argument("--peer", choices=("none", "trl", "tunix"), default="none")
    parser.add_argument("--remat", choices=("on", "off"), default="off", help="ours: recompute each layer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="ours: any option of a config")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each side, in turn")
    parser.add_argument("--updates", type=int, default=3, help="timed updates of each process of ours; a peer has one")
    parser.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--peer-micro", type=int, help="sequences of a peer's micro-batch; default 8 or, variable, 4")
    parser.add_argument("--tokens", type=int, help="scales the case to so many tokens (for tests)")
    parser.add_argument("--model", type=Path, default=processes.REPOSITORY / "models" / "smollm2", help="HF folder")
    parser.add_argument("--measure", action="store_true", help="our side only, in this process")
    options = parser.parse_args()
    return processes.main(lambda: measure(options) if options.measure else compare(options))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the sides in turn."""
    case = make_case(options.case, options.tokens)
    commands = {"ours": processes.ours("learner.py", *sys.argv[1:], "--measure")}
    if options.peer != "none":
        commands[options.peer] = processes.peer(options.peer, f"peer_{options.peer}.py", *_peer_arguments(options))
    runs = processes.alternate(commands, options.rounds)
    sides = {name: processes.side(found, "update_s") for name, found in runs.items()}
    described = {"name": options.case, "tokens": case.tokens, "lengths": list(case.lengths), "how": case.how}
    report = processes.report("learner", case=described, **sides)
    if options.peer != "none":
        report["ratio_tokens_per_s"] = sides["ours"]["tokens_per_s"] / sides[options.peer]["tokens_per_s"]
    return report


def _peer_arguments(options: argparse.Namespace) -> list[str]:
    arguments = ["learner", "--case", options.case, "--model", str(options.model), "--dtype", options.peer_dtype]
    arguments += ["--micro", str(options.peer_micro or (8 if options.case == "full" else 4))]
    return arguments if options.tokens is None else [*arguments, "--tokens", str(options.tokens)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The trainer's own learner on the case: its buckets, packing, objective, optimizer and update step."""
    from hermes_jax.host_memory import reuse_freed_memory
    from hermes_jax.quiet import quiet_libraries

    reuse_freed_memory()
    quiet_libraries()
    import jax.numpy as jnp

    from hermes_jax.assembly import grpo_phase, open_mesh, read_policy, training_buckets
    from hermes_jax.data.packing import pack
    from hermes_jax.learning import Learning
    from hermes_jax.telemetry.flops import measure_peak, mfu, train_flops

    case = make_case(options.case, options.tokens)
    config = _config(options, case)
    policy = read_policy(options.model)
    mesh = open_mesh(config, policy)
    phase = grpo_phase(config, policy, mesh)
    sequences = _sequences(case, policy.config.vocab_size)
    batch, layout = pack(sequences, training_buckets(config, policy, mesh, len(sequences)))
    peak = measure_peak(jnp.float32, seconds=1.0)
    learning = Learning(config, policy, mesh)
    learning.begin(phase, learning.load(options.model))
    began = time.perf_counter()
    learning.prepare(phase, [layout.shape])
    compile_s = time.perf_counter() - began
    seconds, cpu_s, score_s, first, last = _time(learning, phase, batch, options.updates)
    peak = max(peak, measure_peak(jnp.float32, seconds=1.0))
    used = batch.segment_ids.any(axis=(1, 2)).sum() * batch.segment_ids[0].size  # empty micro-batches are skipped
    best = min(seconds)
    return {
        "tokens": int(layout.length.sum()),
        "trained_tokens": int(batch.loss_mask.sum()),
        "shape": list(layout.shape),
        "padding_share": 1 - float(layout.length.sum()) / float(used),
        "remat": config.learner.remat,
        "update_s": best,
        "updates_s": processes.spread(seconds),
        "update_cpu_s": cpu_s,
        "tokens_per_s": case.tokens / best,
        "score_s": score_s,
        "compile_s": compile_s,
        "peak_rss_gib": processes.own_peak_rss() / processes.GIB,
        "matmul_peak_gflops": peak / 1e9,
        "model_gflop": train_flops(_flops_shape(policy.config), case.lengths) / 1e9,
        "mfu": mfu(train_flops(_flops_shape(policy.config), case.lengths), best, peak),
        "loss": last["loss"],
        "first_grad_norm": first["grad_norm"],
        "first_ratio_deviation": first["ratio_deviation_max"],
        "updates_skipped": learning.counters()["skipped_total"],
    }


def _config(options: argparse.Namespace, case: Case) -> Any:
    """A run's config; what `--set` names wins."""
    from hermes_jax.config import load

    widths = [case.width] if options.case == "full" else _widths(case.width)
    ours = [
        f"model.context_length={case.width}",
        f"env.max_token_length={case.width - 1}",
        f"learner.micro_tokens={max(1024, *widths)}",
        f"learner.row_widths={widths}",
        f"learner.remat={'true' if options.remat == 'on' else 'false'}",
        "grpo.temperature=1.0",
        "grpo.iterations_per_batch=1",
        f"env.group_size={len(case.lengths) // 4}",
        "env.groups_per_step=4",
        "env.terminal_backend=local",  # nothing is run
    ]
    return load(overrides=[*ours, f"model.path={os.fspath(options.model)}", *options.set])


def _widths(longest: int) -> list[int]:
    """The longest sequence's own width and a wider one, for the planner to choose from."""
    return [longest, longest * 9 // 8]


def _sequences(case: Case, vocab: int) -> list[Any]:
    import numpy as np

    from hermes_jax.data.packing import TrainingSequence
    from hermes_jax.data.trajectory import Trajectory

    sequences = []
    for number, (length, prompt) in enumerate(zip(case.lengths, case.prompts, strict=True)):
        sampled = np.arange(length) >= prompt
        trajectory = Trajectory(
            tokens=np.array(case.ids(number, vocab)),
            mask=sampled,
            logprobs=np.where(sampled, -1.0, 0.0),
            temperature=np.ones(length),
            policy_version=np.where(sampled, 0, -1),
            turn=np.where(sampled, 0, -1),
        )
        sequences.append(TrainingSequence(trajectory, case.advantage(number), group=number // 4))
    return sequences


def _time(learning: Any, phase: Any, batch: Any, updates: int) -> tuple[list[float], float, float, dict, dict]:
    """(seconds of each timed update, CPU seconds of one, seconds of scoring, metrics of the first and last update)."""
    import jax
    import numpy as np

    began = time.perf_counter()
    old, _ = jax.block_until_ready(learning.score(learning.state.params, batch))
    score_s = time.perf_counter() - began
    batch = batch._replace(old_logprobs=np.asarray(old))
    found, seconds = [], []
    for number in range(1 + updates):  # the first one warms up
        if number == 1:
            cpu_began = time.process_time()
        began = time.perf_counter()
        found.append(jax.device_get(learning.imitate(phase, batch)))
        jax.block_until_ready(learning.state)
        seconds.append(time.perf_counter() - began)
    first, last = ({name: float(value) for name, value in metrics.items()} for metrics in (found[0], found[-1]))
    return seconds[1:], (time.process_time() - cpu_began) / updates, score_s, first, last


def _flops_shape(config: Any) -> Any:
    from hermes_jax.telemetry.flops import TransformerShape

    return TransformerShape(
        layers=config.n_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
    )


if __name__ == "__main__":
    sys.exit(main())
