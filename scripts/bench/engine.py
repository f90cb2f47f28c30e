"""Sampling with SmolLM2-135M in fp32: the embedded engine, beside vLLM on the CPU; prints one JSON object.

    python scripts/bench/engine.py --case many --peer vllm
    python scripts/bench/engine.py --case one --peer vllm
    python scripts/bench/engine.py --case episode

`many`: 32 replies of 128 tokens at the same time, each to a prompt of 64 random ids of its own. `one`: one such reply.
`episode`: 5 turns; each reply has 64 tokens and is followed by 200 ids of a tool. Its time is held against that of
computing all its prompt ids at once, in the same shapes, plus its decode steps.

Temperature 1, no end of sequence; both sides return the log-prob of each token. Each side runs in processes of its own,
in turn; seconds are those of whole requests, start-up and a warm-up wave excluded.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import processes

PROMPT = 64
TOOL = 200


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("many", "one", "episode"), default="many")
    parser.add_argument("--peer", choices=("none", "vllm"), default="none")
    parser.add_argument("--reply", type=int, help="tokens of a reply; default 128, of an episode's turn 64")
    parser.add_argument("--slots", type=int, help="ours; default 32 for many, else 4")
    parser.add_argument("--width", type=int, help="ours: context length; default what the case needs")
    parser.add_argument("--chunk", type=int, default=64, help="ours: ids per prefill chunk")
    parser.add_argument("--decode-steps", type=int, default=8, help="ours: tokens per row and device call")
    parser.add_argument("--turns", type=int, default=5, help="of an episode")
    parser.add_argument("--waves", type=int, default=3, help="timed waves of each process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each side, in turn")
    parser.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--model", type=Path, default=processes.REPOSITORY / "models" / "smollm2", help="HF folder")
    parser.add_argument("--measure", action="store_true", help="our side only, in this process")
    options = parser.parse_args()
    if options.case == "episode" and options.peer != "none":
        parser.error("the episode is held against our own prefill: it has no peer")
    options.reply = options.reply or (64 if options.case == "episode" else 128)
    options.slots = options.slots or (32 if options.case == "many" else 4)
    options.width = options.width or _needed_width(options)
    return processes.main(lambda: measure(options) if options.measure else compare(options))


def _needed_width(options: argparse.Namespace) -> int:
    turns = options.turns if options.case == "episode" else 1
    return PROMPT + turns * (options.reply + TOOL) - TOOL


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the sides in turn."""
    commands = {"ours": processes.ours("engine.py", *sys.argv[1:], "--measure")}
    if options.peer == "vllm":
        count = options.slots if options.case == "many" else 1
        sizes = {"count": count, "prompt": PROMPT, "reply": options.reply, "waves": options.waves}
        arguments = [f"--{name}={value}" for name, value in sizes.items()]
        arguments += [f"--dtype={options.peer_dtype}", f"--model={options.model}"]
        commands["vllm"] = processes.peer("vllm", "peer_vllm.py", *arguments)
    runs = processes.alternate(commands, options.rounds)
    sides = {name: processes.side(found, "seconds") for name, found in runs.items()}
    sizes = {name: getattr(options, name) for name in ("case", "reply", "slots", "width", "chunk", "decode_steps")}
    report = processes.report("engine", sizes={"prompt": PROMPT, **sizes}, **sides)
    if options.peer == "vllm":
        report["ratio_tokens_per_s"] = sides["ours"]["tokens_per_s"] / sides["vllm"]["tokens_per_s"]
    return report


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Our side: the engine with weights and banned ids of the model folder."""
    from hermes_jax.host_memory import reuse_freed_memory
    from hermes_jax.quiet import quiet_libraries

    reuse_freed_memory()
    quiet_libraries()
    from hermes_jax.assembly import read_policy
    from hermes_jax.engines.device import DeviceThread
    from hermes_jax.engines.jax_engine import JaxEngine
    from hermes_jax.models import load_model

    policy = read_policy(options.model)
    with DeviceThread() as device:
        engine = JaxEngine(
            device.submit(lambda: load_model(options.model)[1]).result(),
            policy.config,
            slots=options.slots,
            width=options.width,
            device_thread=device,
            banned=policy.banned,
            chunk=options.chunk,
            decode_steps=options.decode_steps,
        )
        bench = _Bench(engine, policy.config.vocab_size, options)
        found = asyncio.run(bench.episodes() if options.case == "episode" else bench.replies())
    return found | {"peak_rss_gib": processes.own_peak_rss() / processes.GIB}


class _Bench:
    """Asks an engine and takes the time.

    Args:
        vocab: prompts are random ids below it.
    """

    def __init__(self, engine: Any, vocab: int, options: argparse.Namespace) -> None:
        import numpy as np

        self.engine, self.options = engine, options
        self.vocab, self.rng = vocab, np.random.default_rng(0)

    def ids(self, count: int) -> tuple[int, ...]:
        """New random ids, so that nothing is answered from a cache."""
        return tuple(self.rng.integers(10, self.vocab, count).tolist())

    async def ask(self, prompt: Sequence[int], tokens: int, session: str | None = None) -> tuple[int, ...]:
        from hermes_jax.engines.base import Sampling

        sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=int(self.rng.integers(2**31)))
        reply = await self.engine.generate(tuple(prompt), sampling, session=session)
        if len(reply.token_ids) != tokens:
            raise processes.BenchError(f"a reply of {len(reply.token_ids)} tokens instead of {tokens}")
        return reply.token_ids

    async def replies(self) -> dict[str, Any]:
        """Waves of equal replies."""
        count = self.options.slots if self.options.case == "many" else 1
        await self._wave(count, 2)
        seconds, cpu_began, before = [], time.process_time(), self.engine.metrics()
        for _ in range(self.options.waves):
            seconds.append(await self._wave(count, self.options.reply))
        cpu_s = (time.process_time() - cpu_began) / self.options.waves
        after = self.engine.metrics()
        await self.engine.close()
        tokens, best = count * self.options.reply, min(seconds)
        steps = after.decode_steps - before.decode_steps
        return {
            "seconds": best,
            "waves_s": processes.spread(seconds),
            "cpu_s": cpu_s,
            "tokens": tokens,
            "tokens_per_s": tokens / best,
            "ms_per_token": 1000 * best / self.options.reply,
            "decode_step_ms": 1000 * (after.decode_s - before.decode_s) / steps,
            "prefill_ms": 1000 * (sum(seconds) - (after.decode_s - before.decode_s)) / len(seconds),
            "generated": after.tokens_generated - before.tokens_generated,
            "compilations_after_warm_up": after.compilations - before.compilations,
        }

    async def _wave(self, count: int, tokens: int) -> float:
        prompts = [self.ids(PROMPT) for _ in range(count)]
        began = time.perf_counter()
        await asyncio.gather(*(self.ask(prompt, tokens) for prompt in prompts))
        seconds = time.perf_counter() - began
        await asyncio.sleep(0.05)  # the engine counts compilations when it has nothing more to do
        return seconds

    async def episodes(self) -> dict[str, Any]:
        """Episodes, and in turn with each the prefill of as many ids, and decode steps alone."""
        await self._episode()
        took, prefill, step, steps = [], [], [], 0
        for number in range(self.options.waves):
            before = self.engine.metrics().decode_steps
            seconds, length = await self._episode(f"episode {number}")
            took.append(seconds)
            steps = self.engine.metrics().decode_steps - before
            prompt = self.ids(length)
            one = await self._timed(prompt, 1, "prefill")
            step.append(await self._timed(prompt, self.options.reply, "prefill") / self.options.reply)  # prompt is kept
            prefill.append(one - step[-1])
        await self.engine.close()
        floor = min(prefill) + steps * min(step)
        return {
            "seconds": min(took),
            "episodes_s": processes.spread(took),
            "prefill_s": processes.spread(prefill),
            "decode_step_s": processes.spread(step),
            "decode_steps": steps,
            "prompt_ids": length,
            "floor_s": floor,
            "ratio_to_floor": min(took) / floor,
        }

    async def _episode(self, session: str = "warm-up") -> tuple[float, int]:
        """(seconds, ids of the last prompt)."""
        ids, length = list(self.ids(PROMPT)), 0
        began = time.perf_counter()
        for _ in range(self.options.turns):
            length = len(ids)
            ids += await self.ask(ids, self.options.reply, session)
            ids += self.ids(TOOL)
        seconds = time.perf_counter() - began
        await self.engine.release(session)
        return seconds, length

    async def _timed(self, prompt: Sequence[int], tokens: int, session: str) -> float:
        began = time.perf_counter()
        await self.ask(prompt, tokens, session)
        return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
