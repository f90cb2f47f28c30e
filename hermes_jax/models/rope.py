"""Rotary position embedding in fp32, with the context extensions of the supported families."""

from __future__ import annotations

from math import ceil, floor, log, pi

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hermes_jax.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float[np.ndarray, " half"]:
    """Radians per position of each pair of dimensions, as float32 on the host."""
    base = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    if rope.kind == "linear":
        scaled = base / rope.factor
    elif rope.kind == "llama3":
        scaled = _llama3(base, rope)
    elif rope.kind == "yarn":
        scaled = _yarn(base, rope, head_dim)
    else:
        scaled = base
    return np.asarray(scaled, np.float32)


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: wavelengths beyond the original context are divided, short ones kept, those between blended."""
    wavelength = 2 * pi / base
    blend = (rope.original_length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN (arXiv:2309.00071): dimensions that turn often keep their frequency, slow ones are interpolated."""

    def dimension(rotations: float) -> float:
        return head_dim * log(rope.original_length / (rotations * 2 * pi)) / (2 * log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return base / rope.factor * ramp + base * (1 - ramp)


def angles(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "batch time"]
) -> tuple[Float[Array, "batch time half"], Float[Array, "batch time half"]]:
    """(cos, sin) of every position in fp32, yarn's attention factor included."""
    theta = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    return jnp.cos(theta) * rope.attention_factor, jnp.sin(theta) * rope.attention_factor


def rotate(
    x: Float[Array, "batch time heads dim"], cos: Float[Array, "batch time half"], sin: Float[Array, "batch time half"]
) -> Float[Array, "batch time heads dim"]:
    """Turns the pairs (i, i + dim/2) of each head; computed in fp32, returned in the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
