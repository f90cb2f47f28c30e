"""The sections of the GPU check, one per process: `python scripts/gpu_sections.py SECTION FILE [--tiny]`.

* parity: replies of the embedded engine, two turns each, more sequences than slots; their log-probs against the
  learner's. fp32 products must agree (mean 1e-4, max 2e-3 nats); the faster modes are reported. A reply that is asked
  for again in other company must be the same bit for bit.
* learner_bf16, learner_fp32: scorer and update step on packed rows: tokens/s, and MFU against the matrix product's peak
  that was measured in the same process.
* engine: sampled tokens/s with 32 and with 128 slots.

Every item has its seconds, compilations and the process's peak memory so far. The model is random, of Qwen3's type,
made in memory. `--tiny` is for CPUs: it tests the code, its speeds mean nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hermes_jax.data.buckets import Buckets, make_buckets
from hermes_jax.data.packing import PackedBatch, TrainingSequence, pack
from hermes_jax.data.trajectory import Trajectory
from hermes_jax.engines.base import Completion, Sampling
from hermes_jax.engines.device import DeviceThread
from hermes_jax.engines.jax_engine import JaxEngine
from hermes_jax.learner.logprobs import ForwardOptions
from hermes_jax.learner.mesh import make_mesh
from hermes_jax.learner.optimizer import OptimizerConfig, make_optimizer
from hermes_jax.learner.score import make_score
from hermes_jax.learner.state import init_state
from hermes_jax.learner.update import make_update_step
from hermes_jax.models.config import ModelConfig
from hermes_jax.models.transformer import Params, init_params
from hermes_jax.objectives.spec import ObjectiveSpec
from hermes_jax.telemetry.compilations import Compilations
from hermes_jax.telemetry.flops import TransformerShape, measure_peak, mfu, train_flops

MODES = {  # name -> (compute dtype, precision of fp32 products)
    "fp32": ("float32", "highest"),
    "bf16": ("bfloat16", "default"),
    "fp32_default": ("float32", "default"),  # TF32 where the GPU has it: what a run with model.dtype float32 uses
}
MEAN_LIMIT, MAX_LIMIT = 1e-4, 2e-3  # of fp32 parity, nats
N_BANNED = 7  # ids at the end of the vocabulary that are never sampled, as if it were padded
HEAD_CHUNK = 1024
Ids = tuple[int, ...]
Item = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large the checks are; lengths in tokens.

    Args:
        model: hidden, intermediate, layers, heads, head_dim, vocabulary.
        width: context of the engine and width of packed rows.
        modes: of `MODES`, in the parity section.
        parity_slots, parity_replies, prompts, reply: of the parity section: slots, episodes, shortest and longest
            prompt, longest reply.
        sequences, micro_tokens, updates: of the learner: episodes, cells of a micro-batch, most timed updates.
        engine_slots, engine_prompt, engine_reply: of the timed engines.
        peak_size, peak_s: rows of the matrices, and seconds, of the peak's measurement.
    """

    model: tuple[int, int, int, int, int, int] = (1024, 3072, 16, 16, 128, 65536)  # 386 million parameters
    width: int = 1024
    modes: tuple[str, ...] = ("fp32", "bf16", "fp32_default")
    parity_slots: int = 32
    parity_replies: int = 48
    prompts: tuple[int, int] = (16, 512)
    reply: int = 128
    sequences: int = 48
    micro_tokens: int = 8192
    updates: int = 10
    engine_slots: tuple[int, ...] = (32, 128)
    engine_prompt: int = 128
    engine_reply: int = 256
    peak_size: int | None = None
    peak_s: float = 0.5

    def config(self) -> ModelConfig:
        """Qwen3-type with a head of its own: with a tied one, a random model repeats the last token for ever."""
        hidden, intermediate, layers, heads, head_dim, vocab = self.model
        return ModelConfig.from_hf(
            {
                "model_type": "qwen3",
                "hidden_size": hidden,
                "intermediate_size": intermediate,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": heads // 2,
                "head_dim": head_dim,
                "vocab_size": vocab,
                "max_position_embeddings": 4096,
                "rope_theta": 1e6,
                "tie_word_embeddings": False,
            }
        )

    def buckets(self, sequences: int) -> Buckets:
        """Shapes of packed batches of so many episodes."""
        limit = sequences * self.width
        return make_buckets(widths=[self.width], micro_tokens=self.micro_tokens, max_tokens=limit)

    def ids(self, rng: np.random.Generator, count: int) -> Ids:
        """Random ids that are not banned."""
        return tuple(rng.integers(0, self.model[-1] - N_BANNED, count).tolist())


TINY = Sizes(
    model=(32, 64, 2, 4, 8, 97),
    width=64,
    modes=("fp32", "bf16"),
    parity_slots=4,
    parity_replies=6,
    prompts=(2, 20),
    reply=10,
    sequences=6,
    micro_tokens=128,
    updates=2,
    engine_slots=(4,),
    engine_prompt=8,
    engine_reply=8,
    peak_size=256,
    peak_s=0.05,
)


class Items:
    """What a section found so far, on the disk after every item.

    Args:
        file: replaced after every item.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, Item] = {}

    def add(self, name: str, measure: Callable[[], Item]) -> None:
        """Measures an item and saves it; an exception becomes its `error`."""
        began = time.monotonic()
        with Compilations() as compilations:
            try:
                item = measure()
            except Exception as error:
                item = {"error": f"{type(error).__name__}: {error}"[:2000]}
                print(f"{name}: {item['error'][:300]}", file=sys.stderr)
        gc.collect()  # frees the arrays of an item that failed halfway
        self.found[name] = item | {
            "seconds": round(time.monotonic() - began, 2),
            "compilations": compilations.count,
            "compile_s": round(compilations.seconds, 2),
            "peak_memory_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        }
        aside = self.file.with_suffix(".new")
        aside.write_text(json.dumps(self.found), encoding="utf-8")
        aside.replace(self.file)


@dataclass(frozen=True, eq=False)
class Model:
    """A random model: config, fp32 parameters, banned ids."""

    config: ModelConfig
    params: Params
    banned: np.ndarray

    def forward_options(self, dtype: str, *, remat: bool = False) -> ForwardOptions:
        """How the learner runs it."""
        return ForwardOptions(jnp.dtype(dtype), HEAD_CHUNK, remat=remat, banned=self.banned)

    def engine(self, device: DeviceThread, dtype: str, **shapes: Any) -> JaxEngine:
        """An engine with a copy of the weights."""
        return JaxEngine(
            self.params, self.config, device_thread=device, banned=self.banned, dtype=jnp.dtype(dtype), **shapes
        )


def make_model(sizes: Sizes) -> Model:
    """A random model whose logits are as far apart as a language model's."""
    config = sizes.config()
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    spread = 2.5 / (0.02 * config.hidden_size**0.5)  # makes the logits' standard deviation 2.5
    params["head"]["weight"] = params["head"]["weight"] * spread
    return Model(config, params, np.arange(config.vocab_size) >= config.vocab_size - N_BANNED)


# -- parity ------------------------------------------------------------------------------------------------------------


def parity(items: Items, sizes: Sizes) -> None:
    """Log-probs of the engine against those of the learner, by mode."""
    model = make_model(sizes)
    for name in sizes.modes:
        dtype, precision = MODES[name]
        jax.config.update("jax_default_matmul_precision", precision)
        items.add(name, partial(compare, sizes, model, dtype, bounded=name == "fp32"))


def compare(sizes: Sizes, model: Model, dtype: str, *, bounded: bool) -> Item:
    """Plays two-turn episodes, scores them with the learner's forward, and compares token by token."""
    with DeviceThread() as device:
        engine = model.engine(device, dtype, slots=sizes.parity_slots, width=sizes.width)
        trajectories, repeatable = asyncio.run(play(engine, sizes))
    score = make_score(model.config, make_mesh(), model.forward_options(dtype))
    batch, layout = pack([TrainingSequence(t) for t in trajectories], sizes.buckets(len(trajectories)))
    scored = layout.gather(np.asarray(score(model.params, batch)[0]))
    ours = np.concatenate([logprobs[t.mask] for logprobs, t in zip(scored, trajectories, strict=True)])
    theirs = np.concatenate([t.logprobs[t.mask] for t in trajectories])
    gap = np.abs(ours - theirs)
    mean, largest = float(gap.mean()), float(gap.max())
    agree = mean <= MEAN_LIMIT and largest <= MAX_LIMIT if bounded else bool(np.isfinite(largest))
    return {
        "tokens": int(gap.size),
        "mean_abs_diff": mean,
        "p99_abs_diff": float(np.quantile(gap, 0.99)),
        "max_abs_diff": largest,
        "mean_logprob": float(theirs.mean()),
        "same_in_other_company": repeatable,
        "passed": agree and repeatable,
    }


async def play(engine: JaxEngine, sizes: Sizes) -> tuple[list[Trajectory], bool]:
    """Two-turn episodes, all at once; and whether some of their first replies, asked for again, are the same."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(*sizes.prompts, sizes.parity_replies, endpoint=True)
    prompts = [sizes.ids(rng, length) for length in lengths]
    episodes = await asyncio.gather(*(play_one(engine, n, prompt, sizes) for n, prompt in enumerate(prompts)))
    some = range(sizes.parity_slots // 2, 0, -1)
    again = await asyncio.gather(*(engine.generate(prompts[n], sampling(n, sizes)) for n in some))
    await engine.close()
    repeatable = all(reply == episodes[n][1] for n, reply in zip(some, again, strict=True))
    return [trajectory for trajectory, _ in episodes], repeatable


async def play_one(engine: JaxEngine, n: int, prompt: Ids, sizes: Sizes) -> tuple[Trajectory, Completion]:
    """(trajectory, first reply): prompt, reply, some ids as if a tool had answered, reply."""
    how = sampling(n, sizes)
    first = await engine.generate(prompt, how, session=n)
    answer = sizes.ids(np.random.default_rng([1, n]), 1 + n % sizes.reply)
    second = await engine.generate((*prompt, *first.token_ids, *answer), how, session=n)
    await engine.release(n)
    parts = (prompt, first, answer, second)
    ids = [part.token_ids if isinstance(part, Completion) else part for part in parts]
    logprobs = [part.logprobs if isinstance(part, Completion) else [0.0] * len(part) for part in parts]
    turn = np.repeat([-1, 0, -1, 1], [len(part) for part in ids])
    return trajectory(np.concatenate(ids), np.concatenate(logprobs), turn, how.temperature), first


def sampling(n: int, sizes: Sizes) -> Sampling:
    """How reply n is sampled: lengths and temperatures differ."""
    shortest = sizes.reply // 8 + 1
    length = shortest + 37 * n % (sizes.reply - shortest + 1)
    return Sampling(max_tokens=length, temperature=0.7 if n % 2 else 1.0, seed=n)


def trajectory(ids: Any, logprobs: Any, turn: np.ndarray, temperature: float = 1.0) -> Trajectory:
    """A trajectory whose tokens of a turn >= 0 were sampled."""
    sampled = turn >= 0
    return Trajectory(ids, sampled, logprobs, np.where(sampled, temperature, 1.0), np.minimum(turn, 0), turn)


# -- learner -----------------------------------------------------------------------------------------------------------


def learner(items: Items, sizes: Sizes, *, dtype: str) -> None:
    """Peaks, the scorer, and the update with and without recomputed layers; the one that needs most memory is last."""
    model = make_model(sizes)
    peaks: dict[str, float] = {}
    batch, lengths = training_batch(sizes)
    for precision in ("default",) if dtype == "bfloat16" else ("highest", "default"):
        jax.config.update("jax_default_matmul_precision", precision)
        items.add(f"peak_{precision}", partial(time_product, sizes, dtype, precision, peaks))
    work = Work(sizes, model, dtype, batch, lengths, peaks.get("default", 0.0))
    items.add("score", work.time_score)
    items.add("update_remat", partial(work.time_update, remat=True))
    items.add("update", partial(work.time_update, remat=False))


def time_product(sizes: Sizes, dtype: str, precision: str, peaks: dict[str, float]) -> Item:
    """The matrix product's best speed, kept in `peaks`."""
    peaks[precision] = measure_peak(jnp.dtype(dtype), size=sizes.peak_size, seconds=sizes.peak_s)
    return {"tflops_per_s": peaks[precision] / 1e12}


def training_batch(sizes: Sizes) -> tuple[PackedBatch, list[int]]:
    """A packed batch of random episodes, two thirds of whose tokens are trained; and the lengths of the episodes."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(sizes.width // 4, sizes.width, sizes.sequences, endpoint=True).tolist()
    sequences = []
    for n, length in enumerate(lengths):
        turn = np.where(np.arange(length) < length // 3, -1, 0)
        one = trajectory(sizes.ids(rng, length), np.where(turn < 0, 0.0, -3.0), turn)
        sequences.append(TrainingSequence(one, advantage=1.0 if n % 2 else -1.0, group=n))
    return pack(sequences, sizes.buckets(sizes.sequences))[0], lengths


@dataclass(frozen=True, eq=False)
class Work:
    """What the learner is timed with.

    Args:
        dtype: of the matrix products.
        batch, lengths: packed episodes, and their lengths.
        peak: FLOP/s that count as an MFU of 1.
    """

    sizes: Sizes
    model: Model
    dtype: str
    batch: PackedBatch
    lengths: Sequence[int]
    peak: float

    def time_score(self) -> Item:
        """The scorer's speed."""
        score = make_score(self.model.config, make_mesh(), self.model.forward_options(self.dtype))
        seconds, _ = timed(lambda: jax.block_until_ready(score(self.model.params, self.batch)), self.sizes.updates)
        return {"step_s": seconds, "tokens_per_s": sum(self.lengths) / seconds}

    def time_update(self, *, remat: bool) -> Item:
        """Speed and MFU of the update step: clipped surrogate, AdamW, fp32 masters."""
        config, mesh = self.model.config, make_mesh()
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6))
        spec = ObjectiveSpec(objective="clip", clip_low=0.2, clip_high=0.2)
        options = self.model.forward_options(self.dtype, remat=remat)
        step = make_update_step(config, spec, optimizer, mesh, options, known=("rollout_logprobs",))
        state = init_state(self.model.params, optimizer, mesh, config)

        def update() -> dict[str, Any]:
            nonlocal state
            state, metrics = step(state, self.batch)
            return jax.device_get(metrics)

        seconds, metrics = timed(update, self.sizes.updates)
        flops = train_flops(flops_shape(config), self.lengths)
        return {
            "shape": list(self.batch.tokens.shape),
            "padding_share": 1 - sum(self.lengths) / self.batch.tokens.size,
            "step_s": seconds,
            "tokens_per_s": sum(self.lengths) / seconds,
            "model_tflops_per_s": flops / seconds / 1e12,
            "mfu": mfu(flops, seconds, self.peak),
            "loss": float(metrics["loss"]),
            "grad_norm": float(metrics["grad_norm"]),
            "passed": float(metrics["update_skipped"]) == 0,
        }


def timed(run: Callable[[], Any], most: int, seconds: float = 15.0) -> tuple[float, Any]:
    """Median seconds of up to `most` calls, after one that compiles; and the last call's value."""
    value = run()
    times: list[float] = []
    while len(times) < most and sum(times) < seconds:
        began = time.perf_counter()
        value = run()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2], value


def flops_shape(config: ModelConfig) -> TransformerShape:
    """What decides the model's FLOPs."""
    return TransformerShape(
        layers=config.n_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
    )


# -- engine ------------------------------------------------------------------------------------------------------------


def engine(items: Items, sizes: Sizes) -> None:
    """Sampled tokens/s in bf16, by number of slots."""
    model = make_model(sizes)
    for slots in sizes.engine_slots:
        items.add(f"slots_{slots}", partial(time_engine, sizes, model, slots))


def time_engine(sizes: Sizes, model: Model, slots: int) -> Item:
    """One wave of replies of one length, a reply for every slot, after a short wave that compiles."""
    with DeviceThread() as device:
        shapes = {"slots": slots, "width": sizes.width, "chunk": sizes.engine_prompt}
        return asyncio.run(time_waves(model.engine(device, "bfloat16", **shapes), sizes, slots))


async def time_waves(engine: JaxEngine, sizes: Sizes, slots: int) -> Item:
    """The rates; closes the engine."""

    async def wave(seed: int, length: int) -> float:
        rng = np.random.default_rng(seed)
        prompts = [sizes.ids(rng, sizes.engine_prompt) for _ in range(slots)]
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(p, Sampling(length, seed=n)) for n, p in enumerate(prompts)))
        return time.perf_counter() - began

    await wave(0, 2)
    before = engine.metrics()
    seconds = await wave(1, sizes.engine_reply)
    after = engine.metrics()
    await engine.close()
    tokens, decode_s = after.tokens_generated - before.tokens_generated, after.decode_s - before.decode_s
    return {
        "dtype": "bfloat16",
        "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "decode_tokens_per_s": tokens / decode_s,
        "decode_step_s": decode_s / (after.decode_steps - before.decode_steps),
        "passed": tokens == slots * sizes.engine_reply and after.compilations == before.compilations,
    }


SECTIONS: dict[str, Callable[[Items, Sizes], None]] = {
    "parity": parity,
    "learner_bf16": partial(learner, dtype="bfloat16"),
    "learner_fp32": partial(learner, dtype="float32"),
    "engine": engine,
}


def main(name: str, file: str, *flags: str) -> None:
    """Runs a section and writes its items to the file."""
    SECTIONS[name](Items(Path(file)), TINY if "--tiny" in flags else Sizes())


if __name__ == "__main__":
    main(*sys.argv[1:])
