"""The transformer: parameters as a plain tree of arrays, and one `forward` for learner, scorer and engine.

    params = init_params(config, jax.random.key(0))
    hidden, _ = forward(params, config, tokens, positions, segment_ids)     # packed rows
    hidden, cache = forward(params, config, tokens, positions, cache=cache)  # decoding, row b in slot b

`params["layers"]` is either one tree whose leaves have a leading layer axis (a scan runs over it: short programs, fit
for training) or a tuple of trees, one per layer (`unstack_layers`: a loop, so that decoding slices no weights).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from hermes_jax.models.config import ModelConfig
from hermes_jax.models.layers import Block, Context, LayerCache, rms_norm
from hermes_jax.models.rope import angles

Params = dict[str, Any]
_NO_WINDOW = 2**30  # larger than any position: lets layers with and without a window share one scan


class KVCache(NamedTuple):
    """Keys and values of every slot: one array per layer, [slots, kv_heads, width, head_dim].

    The index on the width axis is the token's position. Heads come before the width, so that attention reads the cache
    as it lies; any other order makes XLA transpose the whole cache at each step. Entries must be finite: those that
    a query may not see have no influence, whatever their value.
    """

    k: tuple[Float[Array, "slots kv width dim"], ...]
    v: tuple[Float[Array, "slots kv width dim"], ...]


def init_cache(config: ModelConfig, slots: int, width: int, dtype: DTypeLike = jnp.float32) -> KVCache:
    """An empty cache of `slots` sequences of at most `width` tokens."""
    shape = (slots, config.n_kv_heads, width, config.head_dim)

    def arrays() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layers))

    return KVCache(k=arrays(), v=arrays())


def init_params(config: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters: normal(0.02) matrices, zero biases, unit norms; layers stacked."""
    embed_key, head_key, layers_key = jax.random.split(key, 3)

    def matrix(key: Array) -> Array:
        return 0.02 * jax.random.normal(key, (config.vocab_size, config.hidden_size))

    params: Params = {
        "embed": {"embedding": matrix(embed_key)},
        "layers": jax.vmap(lambda key: _block_state(config, key))(jax.random.split(layers_key, config.n_layers)),
        "final_norm": {"scale": jnp.ones(config.hidden_size)},
    }
    if not config.tied:
        params["head"] = {"weight": matrix(head_key)}
    return jax.tree.map(lambda x: x.astype(dtype), params)


def abstract_params(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Shapes and dtypes of `init_params`, without arrays."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype))


def _block_state(config: ModelConfig, key: Array) -> Params:
    return nnx.to_pure_dict(nnx.state(Block(config, jnp.float32, nnx.Rngs(key))))


@lru_cache(maxsize=64)
def _block_graph(config: ModelConfig, dtype: DTypeLike) -> nnx.GraphDef:
    """Structure of one block, split from its (abstract) state once per config and dtype."""
    return nnx.split(nnx.eval_shape(lambda: Block(config, dtype, nnx.Rngs(0))))[0]


def unstack_layers(params: Params) -> Params:
    """The same parameters with `layers` as a tuple of per-layer trees (layers copied, the rest shared)."""
    stacked = params["layers"]
    if isinstance(stacked, tuple):
        return params
    n_layers = jax.tree.leaves(stacked)[0].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(n_layers))}


def head_weight(params: Params) -> Float[Array, "vocab hidden"]:
    """Weight of the LM head: its own or, where tied, the embedding."""
    return params["head"]["weight"] if "head" in params else params["embed"]["embedding"]


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "batch time"],
    positions: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"] | None = None,
    cache: KVCache | None = None,
    slots: Int[Array, " batch"] | None = None,
    compute_dtype: DTypeLike = jnp.float32,
    remat: bool = False,
) -> tuple[Float[Array, "batch time hidden"], KVCache | None]:
    """Hidden states after the final norm, and the updated cache.

    Norms, rotary angles and softmax are fp32; matrices run in `compute_dtype`.

    Args:
        params: layers stacked or per layer; a cache needs them per layer (`unstack_layers`).
        tokens: ids.
        positions: from 0 within each sequence. With a cache, >= its width means padding.
        segment_ids: without a cache: tokens see only their own segment. None = one sequence per row.
        cache: donated by the caller's jit, it is updated in place.
        slots: slot of each row; distinct, except rows of padding only. None = row b works on slot b.
        remat: recompute each layer in the backward pass (scan over stacked layers only).

    Raises:
        ValueError: arguments that don't go together.
    """
    if cache is not None and (segment_ids is not None or not isinstance(params["layers"], tuple)):
        raise ValueError("a cache goes with unstack_layers(params) and without segment_ids")
    cos, sin = angles(config.rope, config.head_dim, positions)
    context = Context(cos, sin, positions, segment_ids, slots)
    x = params["embed"]["embedding"][tokens].astype(compute_dtype)
    if isinstance(params["layers"], tuple):
        x, cache = _loop(params["layers"], config, x, context, cache, compute_dtype)
    else:
        x = _scan(params["layers"], config, x, context, compute_dtype, remat)
    return rms_norm(x, params["final_norm"]["scale"], config.norm_eps), cache


def _scan(layers: Params, config: ModelConfig, x: Array, context: Context, dtype: DTypeLike, remat: bool) -> Array:
    graph = _block_graph(config, jnp.dtype(dtype))
    windows = None
    if any(config.windows):
        windows = jnp.array([_NO_WINDOW if w is None else w for w in config.windows], jnp.int32)

    def body(x: Array, layer: tuple[Params, Array | None]) -> tuple[Array, None]:
        state, window = layer
        return nnx.merge(graph, state)(x, context, window, None)[0], None

    return jax.lax.scan(jax.checkpoint(body) if remat else body, x, (layers, windows))[0]


def _loop(
    layers: tuple[Params, ...], config: ModelConfig, x: Array, context: Context, cache: KVCache | None, dtype: DTypeLike
) -> tuple[Array, KVCache | None]:
    graph = _block_graph(config, jnp.dtype(dtype))
    caches: list[LayerCache | None] = [None] * len(layers) if cache is None else list(zip(*cache, strict=True))
    for i, state in enumerate(layers):
        x, caches[i] = nnx.merge(graph, state)(x, context, config.windows[i], caches[i])
    if cache is None:
        return x, None
    k, v = zip(*(layer for layer in caches if layer is not None), strict=True)
    return x, KVCache(k=k, v=v)
