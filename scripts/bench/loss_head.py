"""The LM head's log-probs and their gradient, in chunks against all logits at once; prints one JSON object.

    python scripts/bench/loss_head.py

Memory: what XLA sets aside for temporary arrays of the forward and backward pass over 8,192 tokens (vocabulary
151,936, hidden size 1,024, fp32); nothing runs for that. Time: the same programs over `--time-tokens` tokens, since all
logits of 8,192 take 5 GB per copy; each version in processes of its own, in turn. Both give log-prob and entropy of
each token.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import processes

VERSIONS = ("chunked", "full")


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the memory's comparison")
    parser.add_argument("--time-tokens", type=int, default=1536, help="of the time's; 0 = memory only")
    parser.add_argument("--chunk", type=int, default=512, help="tokens whose logits exist at once")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--calls", type=int, default=3, help="timed calls of each process, after one that warms up")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each version, in turn")
    parser.add_argument("--measure", choices=VERSIONS, help="one version only, in this process")
    options = parser.parse_args()
    return processes.main(lambda: measure(options) if options.measure else compare(options))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Runs both versions in turn."""
    commands = {name: processes.ours("loss_head.py", *sys.argv[1:], "--measure", name) for name in VERSIONS}
    runs = processes.alternate(commands, options.rounds)
    sides = {name: processes.side(found, "call_s") for name, found in runs.items()}
    chunked, full = (sides[name] for name in VERSIONS)
    ratios = {"ratio_temporary_bytes": chunked["temporary_bytes"] / full["temporary_bytes"]}
    if options.time_tokens:
        ratios["ratio_time"] = chunked["call_s"] / full["call_s"]
    sizes = {name: getattr(options, name) for name in ("tokens", "time_tokens", "vocab", "hidden", "chunk", "dtype")}
    return processes.report("loss_head", sizes=sizes, **sides, **ratios)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One version: bytes at `--tokens`, seconds at `--time-tokens`."""
    from hermes_jax.host_memory import reuse_freed_memory
    from hermes_jax.quiet import quiet_libraries

    reuse_freed_memory()
    quiet_libraries()
    import jax

    program = _program(options.measure, options.chunk)
    compiled = program.lower(*_arguments(options, options.tokens, abstract=True)).compile()
    found: dict[str, Any] = {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes, "call_s": 0.0}
    if not options.time_tokens:
        return found
    arguments = _arguments(options, options.time_tokens, abstract=False)
    timed = program.lower(*arguments).compile()
    seconds, cpu_began = [], 0.0
    for number in range(1 + options.calls):
        if number == 1:
            cpu_began = time.process_time()
        began = time.perf_counter()
        (loss, _), gradients = jax.block_until_ready(timed(*arguments))
        seconds.append(time.perf_counter() - began)
    cpu_s = (time.process_time() - cpu_began) / options.calls
    found |= {
        "call_s": min(seconds[1:]),
        "calls_s": processes.spread(seconds[1:]),
        "call_cpu_s": cpu_s,
        "loss": float(loss),
        "gradient_norms": [float(jax.numpy.linalg.norm(g.astype("float32"))) for g in gradients],
        "peak_rss_gib": processes.own_peak_rss() / processes.GIB,
    }
    return found


def _program(version: str, chunk: int) -> Any:
    """The jitted function (hidden, head, targets, temperature, weight) -> ((loss, entropy), gradients of both)."""
    import jax
    import jax.numpy as jnp

    from hermes_jax.models.head import token_stats

    def chunked(hidden, head, targets, temperature):
        return token_stats(hidden, head, targets, temperature, None, chunk)

    def full(hidden, head, targets, temperature):
        logits = jnp.einsum("th,vh->tv", hidden, head, preferred_element_type=jnp.float32) / temperature[:, None]
        logp = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
        held = jax.lax.stop_gradient(logp)
        return picked, -jnp.sum(jnp.exp(held) * held, axis=-1)

    stats = chunked if version == "chunked" else full

    def loss(hidden, head, targets, temperature, weight):
        logprobs, entropy = stats(hidden, head, targets, temperature)
        return jnp.sum(weight * logprobs), entropy.mean()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def _arguments(options: argparse.Namespace, tokens: int, *, abstract: bool) -> tuple[Any, ...]:
    import jax
    import numpy as np

    shapes = {"hidden": (tokens, options.hidden), "head": (options.vocab, options.hidden)}
    if abstract:
        big = [jax.ShapeDtypeStruct(shape, options.dtype) for shape in shapes.values()]
        rest = [jax.ShapeDtypeStruct((tokens,), dtype) for dtype in ("int32", "float32", "float32")]
        return (*big, *rest)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal(shapes["hidden"], np.float32)
    head = rng.standard_normal(shapes["head"], np.float32) / np.float32(options.hidden**0.5)
    targets = rng.integers(0, options.vocab, tokens).astype(np.int32)
    rest = (targets, np.full(tokens, 0.7, np.float32), rng.standard_normal(tokens).astype(np.float32))
    big = [jax.numpy.asarray(x, options.dtype) for x in (hidden, head)]
    return (*big, *map(jax.device_put, rest))


if __name__ == "__main__":
    sys.exit(main())
