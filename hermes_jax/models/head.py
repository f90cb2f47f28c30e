"""The LM head: hidden states to (log-prob, entropy) per token, without an array of [tokens, vocab].

The logits of a chunk of tokens exist only while that chunk is worked on; the backward pass computes them again.
Log-probs and entropies are those of the distribution that was sampled from: logits / temperature, banned ids at 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def logits(
    hidden: Float[Array, "*batch hidden"],
    head_weight: Float[Array, "vocab hidden"],
    banned: Bool[Array, " vocab"] | None = None,
) -> Float[Array, "*batch vocab"]:
    """fp32 logits, -inf where banned. For few tokens: training uses `token_stats`."""
    weight = head_weight.astype(hidden.dtype)
    out = jnp.einsum("...h,vh->...v", hidden, weight, preferred_element_type=jnp.float32)
    return out if banned is None else jnp.where(banned, -jnp.inf, out)


def token_stats(
    hidden: Float[Array, "*rows tokens hidden"],
    head_weight: Float[Array, "vocab hidden"],
    targets: Int[Array, "*rows tokens"],
    temperature: Float[Array, "*rows tokens"],
    banned: Bool[Array, " vocab"] | None = None,
    chunk: int | None = None,
    wanted: Bool[Array, "*rows tokens"] | None = None,
) -> tuple[Float[Array, "*rows tokens"], Float[Array, "*rows tokens"]]:
    """Log-prob of each target and entropy (nats) of its distribution, at the token's temperature; fp32.

    `z = logits / temperature`; `logprob = z[target] - logsumexp(z)`; `entropy = -sum p log p`. Banned ids have p = 0
    and gradient 0; a banned target has log-prob -inf. Differentiable in `hidden` and `head_weight` (the temperature is
    a constant); sums are fp32, the products run in the dtype of `hidden`.

    Args:
        hidden: state that predicts the target (that of the token before it).
        temperature: > 0.
        chunk: tokens whose logits exist at once; None = all.
        wanted: both results are 0 for other tokens, and chunks cost only what the wanted ones need. None = all.
    """
    shape, width = targets.shape, targets.shape[-1]

    def rows(x: Array) -> Array:
        return x.reshape(-1, *x.shape[len(shape) - 1 :])

    hidden, targets, temperature = rows(hidden), rows(targets), rows(temperature.astype(jnp.float32))
    wanted = jnp.ones(targets.shape, bool) if wanted is None else rows(wanted)
    n_chunks = 1 if chunk is None else -(-targets.size // chunk)
    size = -(-width // n_chunks)  # evened out, so that little is padded
    padding = size * n_chunks - width

    def pad(x: Array, value: float) -> Array:
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    stats = _stats(
        n_chunks, pad(hidden, 0), head_weight, pad(targets, 0), pad(temperature, 1), pad(wanted, False), banned
    )
    logprobs, entropy = (x[:, :width].reshape(shape) for x in stats)
    return logprobs, entropy


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(
    n_chunks: int,
    hidden: Array,
    head_weight: Array,
    targets: Array,
    temperature: Array,
    wanted: Array,
    banned: Array | None,
) -> tuple[Array, Array]:
    return _forward(n_chunks, hidden, head_weight, targets, temperature, wanted, banned)[0]


def _forward(n_chunks, hidden, head_weight, targets, temperature, wanted, banned):
    order = _Order(n_chunks, wanted)
    hs, ts, temps = order.chunks(hidden, targets, temperature)

    def body(i, stats):
        logp, p = _distribution(hs[i], head_weight, temps[i], banned)
        picked = jnp.sum(jnp.where(_is_target(ts[i], logp), logp, 0.0), axis=-1)
        return stats[0].at[i].set(picked), stats[1].at[i].set(_entropy(logp, p))

    start = jnp.zeros(ts.shape, jnp.float32)
    stats = order.each(body, (start, start))
    out = tuple(jnp.where(wanted, order.joined(x), 0.0) for x in stats)
    return out, (hidden, head_weight, targets, temperature, wanted, banned)


def _backward(n_chunks, saved, cotangents):
    """d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy), with z = logits / temperature."""
    hidden, head_weight, targets, temperature, wanted, banned = saved
    weight = head_weight.astype(hidden.dtype)
    order = _Order(n_chunks, wanted)
    hs, ts, temps = order.chunks(hidden, targets, temperature)
    d_logprobs, d_entropies = order.chunks(*(jnp.where(wanted, x, 0.0) for x in cotangents))

    def body(i, grads):
        h = hs[i]
        temp, d_logprob, d_entropy = (x[i][:, None] for x in (temps, d_logprobs, d_entropies))
        logp, p = _distribution(h, head_weight, temps[i], banned)
        surprise = jnp.where(p > 0, logp, 0.0) + _entropy(logp, p)[:, None]
        d_z = d_logprob * (_is_target(ts[i], logp) - p) - d_entropy * p * surprise
        d_z = (d_z if banned is None else jnp.where(banned, 0.0, d_z)) / temp
        d_z = d_z.astype(h.dtype)
        d_h = jnp.einsum("nv,vh->nh", d_z, weight, preferred_element_type=jnp.float32)
        d_weight = jnp.einsum("nv,nh->vh", d_z, h, preferred_element_type=jnp.float32)
        return grads[0].at[i].set(d_h.astype(h.dtype)), grads[1] + d_weight

    start = jnp.zeros_like(hs), jnp.zeros(head_weight.shape, jnp.float32)
    d_hidden, d_weight = order.each(body, start)
    return order.joined(d_hidden), d_weight.astype(head_weight.dtype), None, None, None, None


_stats.defvjp(_forward, _backward)


class _Order:
    """The tokens of each row, wanted ones first, in chunks of columns.

    Each chunk holds tokens of every row: where rows are spread over devices, its work is too.
    """

    def __init__(self, n_chunks: int, wanted: Bool[Array, "rows width"]) -> None:
        self.n_chunks, self.wanted = n_chunks, wanted
        self.order = None if n_chunks == 1 else jnp.argsort(~wanted, axis=1, stable=True)
        self.shape = wanted.shape

    def each(self, body: Callable[[Any, Any], Any], start: Any) -> Any:
        """`body(i, carry)` for every chunk i that holds wanted tokens."""
        if self.n_chunks == 1:  # no loop: forward and backward pass of one program share the logits
            return body(0, start)
        size = self.shape[1] // self.n_chunks
        return jax.lax.fori_loop(0, -(-jnp.sum(self.wanted, axis=1).max() // size), body, start)

    def chunks(self, *arrays: Array) -> tuple[Array, ...]:
        return tuple(self._chunked(x) for x in arrays)

    def _chunked(self, x: Shaped[Array, "rows width *rest"]) -> Shaped[Array, "chunk tokens *rest"]:
        x = x if self.order is None else _take(x, self.order)
        rows, rest = x.shape[0], x.shape[2:]
        return x.reshape(rows, self.n_chunks, -1, *rest).swapaxes(0, 1).reshape(self.n_chunks, -1, *rest)

    def joined(self, chunks: Shaped[Array, "chunk tokens *rest"]) -> Shaped[Array, "rows width *rest"]:
        """Undoes `chunks`."""
        rows, rest = self.shape[0], chunks.shape[2:]
        x = chunks.reshape(self.n_chunks, rows, -1, *rest).swapaxes(0, 1).reshape(rows, -1, *rest)
        return x if self.order is None else _take(x, jnp.argsort(self.order, axis=1))


def _take(x: Shaped[Array, "rows width *rest"], index: Int[Array, "rows width"]) -> Shaped[Array, "rows width *rest"]:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def _distribution(h, head_weight, temperature, banned):
    """(log p, p) of a chunk, fp32, relative to the largest logit; -inf and exactly 0 where banned."""
    z = logits(h, head_weight, banned) / temperature[:, None]
    z = z - jnp.max(z, axis=-1, keepdims=True)
    logp = z - jnp.log(jnp.sum(jnp.exp(z), axis=-1, keepdims=True))
    return logp, jnp.exp(logp)


def _entropy(logp, p):
    return -jnp.sum(jnp.where(p > 0, p * logp, 0.0), axis=-1)  # p log p is 0 * -inf where banned


def _is_target(target, logp):
    """One-hot rows by comparison: a gather would collect a vocabulary that is sharded over devices."""
    return jnp.arange(logp.shape[-1]) == target[:, None]
