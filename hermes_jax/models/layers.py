"""The blocks of the transformer as Flax NNX modules.

Shape letters: B batch, T time (queries), S keys, K key/value heads, G query heads per key/value head, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from hermes_jax.models.attention import Place, Window, attend, attend_one, cache_mask, packed_attention
from hermes_jax.models.config import ModelConfig
from hermes_jax.models.rope import rotate

_INIT = nnx.initializers.normal(0.02)


class Context(NamedTuple):
    """What all layers of one call share.

    Args:
        cos, sin: rotary angles of the queries, fp32.
        positions: position of each query within its own sequence.
        segments: which sequence of the packed row a token belongs to; None = one sequence per row.
        slots: row of the cache per row of the call; None = row b uses slot b.
    """

    cos: Float[Array, "batch time half"]
    sin: Float[Array, "batch time half"]
    positions: Int[Array, "batch time"]
    segments: Int[Array, "batch time"] | None
    slots: Int[Array, " batch"] | None


LayerCache = tuple[Float[Array, "slots kv width dim"], Float[Array, "slots kv width dim"]]


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in fp32 whatever the dtype of x (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        return rms_norm(x, self.scale[...], self.eps)


def rms_norm(x: Float[Array, "*batch size"], scale: Float[Array, " size"], eps: float) -> Float[Array, "*batch size"]:
    """The function behind `RMSNorm`; computed in fp32, returned in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; keys and values are never repeated per query head."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        size, dim = config.hidden_size, config.head_dim
        self.q = _linear(size, config.n_heads * dim, config.qkv_bias, dtype, rngs)
        self.k = _linear(size, config.n_kv_heads * dim, config.qkv_bias, dtype, rngs)
        self.v = _linear(size, config.n_kv_heads * dim, config.qkv_bias, dtype, rngs)
        self.o = _linear(config.n_heads * dim, size, config.out_bias, dtype, rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.norm_eps)
            self.k_norm = RMSNorm(dim, config.norm_eps)

    def __call__(
        self,
        x: Float[Array, "batch time hidden"],
        context: Context,
        window: Window,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "batch time hidden"], LayerCache | None]:
        q, k, v = self._project(x, context)
        if cache is None:
            out = packed_attention(q, k, v, Place(context.positions, context.segments), window)
        else:
            cache = write_cache(cache, k, v, context.positions, context.slots)
            keys, values = cache if context.slots is None else (cache[0][context.slots], cache[1][context.slots])
            out = _attend_cache(q, keys, values, context.positions, window)
        return self.o(out), cache

    def _project(self, x: Array, context: Context) -> tuple[Array, Array, Array]:
        """q as BxKxGxTxD, k and v as BxKxTxD: heads lead, so that both products are plain batched matmuls."""
        config, (batch, time, _) = self.config, x.shape
        q = self.q(x).reshape(batch, time, config.n_heads, config.head_dim)
        k = self.k(x).reshape(batch, time, config.n_kv_heads, config.head_dim)
        v = self.v(x).reshape(batch, time, config.n_kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        q = q.reshape(batch, time, config.n_kv_heads, -1, config.head_dim).transpose(0, 2, 3, 1, 4)
        return q, k.swapaxes(1, 2), v.swapaxes(1, 2)


def _attend_cache(
    q: Float[Array, "batch kv group time dim"],
    keys: Float[Array, "batch kv width dim"],
    values: Float[Array, "batch kv width dim"],
    positions: Int[Array, "batch time"],
    window: Window,
) -> Float[Array, "batch time heads_dim"]:
    if q.shape[3] == 1:
        return attend_one(q[:, :, :, 0], keys, values, positions[:, 0], window)[:, None].astype(q.dtype)
    mask = cache_mask(positions, keys.shape[2], window)
    return attend(q, keys.astype(q.dtype), values.astype(q.dtype), mask)


def write_cache(
    cache: LayerCache, k: Array, v: Array, positions: Int[Array, "batch time"], slots: Int[Array, " batch"] | None
) -> LayerCache:
    """Puts new keys and values at [slot, :, position]; positions beyond the width are dropped (padding)."""
    rows = (jnp.arange(k.shape[0]) if slots is None else slots)[:, None]

    def put(old: Array, new: Array) -> Array:
        return old.at[rows, :, positions].set(new.swapaxes(1, 2).astype(old.dtype), mode="drop")

    return put(cache[0], k), put(cache[1], v)


class MLP(nnx.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        size, inner = config.hidden_size, config.intermediate_size
        self.gate = _linear(size, inner, config.mlp_bias, dtype, rngs)
        self.up = _linear(size, inner, config.mlp_bias, dtype, rngs)
        self.down = _linear(inner, size, config.mlp_bias, dtype, rngs)

    def __call__(self, x: Float[Array, "batch time hidden"]) -> Float[Array, "batch time hidden"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, dtype, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self,
        x: Float[Array, "batch time hidden"],
        context: Context,
        window: Window,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "batch time hidden"], LayerCache | None]:
        out, cache = self.attn(self.attn_norm(x), context, window, cache)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), cache


def _linear(n_in: int, n_out: int, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        n_in,
        n_out,
        use_bias=bias,
        dtype=dtype,
        param_dtype=jnp.float32,
        kernel_init=_INIT,
        dot_general=_over_flat_tokens,
        rngs=rngs,
    )


def _over_flat_tokens(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
    """x @ kernel with all tokens on one axis.

    With two axes of tokens, XLA on CPU transposes whole activations for the kernel's gradient: twice as slow.
    """
    del dimension_numbers  # always the last axis of x with the first of the kernel
    flat = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), **options)
    return flat.reshape(*x.shape[:-1], -1)
