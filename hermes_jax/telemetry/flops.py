"""Model FLOPs of training, and the peak to hold them against: MFU.

Model FLOPs (PaLM, arXiv:2204.02311, appendix B) count what the mathematics needs: 6 per matrix parameter and token for
the forward and backward pass, and attention's two products; recomputation and padding do not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@dataclass(frozen=True)
class TransformerShape:
    """Sizes that decide the FLOPs of a decoder with gated MLP.

    Args:
        layers, hidden, intermediate: number and widths of the layers.
        heads, kv_heads, head_dim: attention.
        vocab: columns of the head; the embedding is a look-up and costs nothing.
        window: positions that a token attends to at most, None = all before it.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int | None = None

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + self.hidden * self.vocab


def train_flops(shape: TransformerShape, lengths: Sequence[int]) -> float:
    """Model FLOPs of one forward and backward pass over sequences of these lengths (tokens).

    Attention: each of the two products takes `2 * heads * head_dim` FLOPs per pair of tokens, three times with the
    backward pass.
    """
    tokens = np.asarray(lengths, np.float64)
    pairs = attended_pairs(tokens, shape.window).sum()
    attention = 12.0 * shape.layers * shape.heads * shape.head_dim * pairs
    return 6.0 * shape.matmul_parameters * float(tokens.sum()) + float(attention)


def attended_pairs(tokens: np.ndarray, window: int | None) -> np.ndarray:
    """Pairs (query, key) of causal attention for each length; each token attends to itself as well."""
    full = tokens * (tokens + 1) / 2
    if window is None:
        return full
    beyond = np.maximum(tokens - window, 0)
    return full - beyond * (beyond + 1) / 2


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Share of the peak (FLOP/s) that `flops` in `seconds` make; 0 if no time passed."""
    return flops / seconds / peak if seconds > 0 and peak > 0 else 0.0


def measure_peak(dtype: DTypeLike = jnp.float32, *, size: int | None = None, seconds: float = 0.3) -> float:
    """Best speed of a square matrix product on one device (FLOP/s), measured for about `seconds`.

    Args:
        dtype: of both factors.
        size: rows; None = 1024 on a CPU, 8192 elsewhere.
        seconds: time spent, compilation not included.
    """
    if size is None:
        size = 1024 if jax.default_backend() == "cpu" else 8192
    product = jax.jit(lambda a, b: a @ b)
    a = jnp.full((size, size), 0.5, dtype)
    product(a, a).block_until_ready()
    best, end = 0.0, time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        product(a, a).block_until_ready()
        now = time.perf_counter()
        best = max(best, 2.0 * size**3 / (now - began))
        if now >= end:
            return best
