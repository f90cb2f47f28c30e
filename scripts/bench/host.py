"""What the host does between device calls; prints one JSON object.

    python scripts/bench/host.py

Packing and advantages of 4,096 trajectories; rendering, parsing and masking of an episode's turns (the real agent loop,
an engine and a tool that answer at once); and loading the weights: speed against that of reading the same file, both
with nothing of it in the page cache, and peak memory over that of the process before. Loading has processes of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
from cases import variable_lengths

PARTS = ("work", "load")
TOOL_TOKENS = 200


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5, help="of an episode")
    parser.add_argument("--repeats", type=int, default=5, help="the best of so many counts")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each part, in turn")
    parser.add_argument("--model", type=Path, default=processes.REPOSITORY / "models" / "smollm2", help="HF folder")
    parser.add_argument("--measure", choices=PARTS, help="one part only, in this process")
    options = parser.parse_args()
    return processes.main(lambda: measure(options) if options.measure else compare(options))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Runs both parts in turn."""
    commands = {part: processes.ours("host.py", *sys.argv[1:], "--measure", part) for part in PARTS}
    runs = processes.alternate(commands, options.rounds)
    figure = {"work": "pack_ms", "load": "load_s"}
    return processes.report("host", **{part: processes.side(runs[part], figure[part]) for part in PARTS})


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One part."""
    from hermes_jax.host_memory import reuse_freed_memory
    from hermes_jax.quiet import quiet_libraries

    reuse_freed_memory()
    quiet_libraries()
    if options.measure == "load":
        return load(options)
    return {**pack(options), **advantages(options), **turns(options)}


def pack(options: argparse.Namespace) -> dict[str, Any]:
    """Packing into the shapes that a run with micro-batches of 8,192 tokens has."""
    import numpy as np

    from hermes_jax.data.buckets import make_buckets
    from hermes_jax.data.packing import TrainingSequence, pack
    from hermes_jax.data.trajectory import Trajectory

    count = options.trajectories
    lengths = np.random.default_rng(0).permutation(variable_lengths(count, 1024, count * 320)).tolist()
    sequences = []
    for number, length in enumerate(lengths):
        sampled = np.arange(length) >= max(length // 8, 1)
        state = np.where(sampled, 0, -1)
        trajectory = Trajectory(np.arange(length), sampled, -1.0 * sampled, np.ones(length), state, state)
        sequences.append(TrainingSequence(trajectory, 1.0, group=number // 8))
    buckets = make_buckets(widths=[1024], micro_tokens=8192, max_tokens=count * 1024)
    seconds, (batch, layout) = _best(lambda: pack(sequences, buckets), options.repeats)
    return {
        "trajectories": count,
        "packed_tokens": int((batch.segment_ids > 0).sum()),
        "padding_share": layout.padding_share,
        "pack_ms": 1000 * seconds,
    }


def advantages(options: argparse.Namespace) -> dict[str, Any]:
    """Advantages in groups of 8."""
    import numpy as np

    from hermes_jax.objectives import group_advantages

    rewards = np.random.default_rng(0).normal(size=options.trajectories).tolist()
    groups = [number // 8 for number in range(options.trajectories)]
    seconds, result = _best(lambda: group_advantages(rewards, groups), options.repeats)
    return {"advantages_ms": 1000 * seconds, "advantage_std": float(np.std(result.advantages))}


def turns(options: argparse.Namespace) -> dict[str, Any]:
    """Episodes in which every turn calls a tool that gives about 200 tokens, but for the last one."""
    from hermes_jax.assembly import read_policy
    from hermes_jax.engines.base import Completion
    from hermes_jax.rollout.agent import Agent, EpisodeLimits
    from hermes_jax.rollout.agent_loop import run_episode
    from hermes_jax.rollout.chat import ChatRenderer
    from hermes_jax.rollout.parsers import get_parser

    policy = read_policy(options.model)
    renderer = ChatRenderer(policy.tokenizer, stop_ids=policy.stop_ids)
    call = '<tool_call>\n{"name": "look", "arguments": {"path": "notes/today.txt"}}\n</tool_call>'
    words = [f"line {number}: the quick brown fox" for number in range(200)]
    while len(renderer.codec.encode("\n".join(words))) > TOOL_TOKENS:
        words.pop()
    replies = [renderer.codec.encode(text) for text in [*[call] * (options.turns - 1), "That is all."]]
    ends = [renderer.end_id(before_answer=number + 1 < options.turns) for number in range(options.turns)]

    class Engine:
        """Answers at once."""

        def __init__(self) -> None:
            self.asked = 0

        async def generate(self, prompt_ids: Any, sampling: Any, **_: Any) -> Completion:
            ids = (*replies[self.asked], ends[self.asked])
            self.asked += 1
            return Completion(ids, (-1.0,) * len(ids), "stop", (0,) * len(ids))

        async def release(self, session: Any) -> None:
            """Keeps nothing."""

    class Look:
        """Answers at once."""

        async def call(self, arguments: dict[str, Any], ctx: Any, /) -> str:
            return "\n".join(words)

    def play() -> Any:
        limits = EpisodeLimits(max_turns=options.turns, context_limit=100_000)
        agent = Agent(Engine(), renderer, get_parser("hermes"), {"look": Look()}, limits, vocab_size=10**6)
        messages = [{"role": "user", "content": "What is in the notes?"}]
        return asyncio.run(run_episode(agent, messages, task_id="bench"))

    play()
    seconds, episode = _best(play, options.repeats)
    if episode.counters["turns"] != options.turns or episode.error:
        raise processes.BenchError(
            f"an episode of {episode.counters['turns']} turns: {episode.outcome}, {episode.error}"
        )
    return {
        "turns": options.turns,
        "episode_tokens": sum(len(t) for t in episode.trajectories),
        "sampled_tokens": episode.n_sampled,
        "turn_ms": 1000 * seconds / options.turns,
    }


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Loading and reading in turn, each after the file was dropped from the page cache."""
    import jax

    from hermes_jax.models import load_model

    files = sorted(options.model.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    jax.numpy.zeros(1).block_until_ready()  # the backend is there
    before = processes.own_peak_rss()
    load_s, read_s = [], []
    for _ in range(options.repeats):
        _drop(files)
        load_s.append(_best(lambda: jax.block_until_ready(load_model(options.model)[1]), 1)[0])
        if len(load_s) == 1:
            peak = processes.own_peak_rss()
        _drop(files)
        read_s.append(_best(lambda: _read(files), 1)[0])
    return {
        "model_bytes": size,
        "load_s": min(load_s[1:] or load_s),  # the first one compiles
        "first_load_s": load_s[0],
        "read_s": min(read_s),
        "read_gb_per_s": size / min(read_s) / 1e9,
        "share_of_read_speed": min(read_s) / min(load_s[1:] or load_s),
        "rss_over_model": (peak - before) / size,
        "rss_before_gib": before / processes.GIB,
    }


def _drop(files: list[Path]) -> None:
    """Takes files out of the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read(files: list[Path]) -> None:
    buffer = bytearray(1 << 24)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _best(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """(seconds of the fastest call, what it returned)."""
    best, found = float("inf"), None
    for _ in range(repeats):
        began = time.perf_counter()
        found = call()
        best = min(best, time.perf_counter() - began)
    return best, found


if __name__ == "__main__":
    sys.exit(main())
