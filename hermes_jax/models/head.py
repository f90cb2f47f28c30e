"""The LM head: hidden states to (log-prob, entropy) per token, without an array of [tokens, vocab].

The logits of a chunk of tokens exist only while that chunk is worked on; the backward pass computes them again.
Log-probs and entropies are those of the distribution that was sampled from: logits / temperature, banned ids at 0.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
    hidden: Float[Array, "tokens hidden"],
    head_weight: Float[Array, "vocab hidden"],
    targets: Int[Array, " tokens"],
    temperature: Float[Array, " tokens"],
    banned: Bool[Array, " vocab"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """Log-prob of each target and entropy (nats) of its distribution, at the token's temperature; fp32.

    `z = logits / temperature`; `logprob = z[target] - logsumexp(z)`; `entropy = -sum p log p`. Banned ids have p = 0
    and gradient 0; a banned target has log-prob -inf. Differentiable in `hidden` and `head_weight` (the temperature is
    a constant); sums are fp32, the products run in the dtype of `hidden`.

    Args:
        hidden: state that predicts the target (that of the token before it).
        temperature: > 0.
        chunk: tokens per chunk; None = all in one.
    """
    n_tokens = hidden.shape[0]
    n_chunks = 1 if chunk is None else -(-n_tokens // chunk)
    size = -(-n_tokens // n_chunks)  # evened out, so that little is padded

    def pad(x: Array, value: float) -> Array:
        return jnp.pad(x, [(0, size * n_chunks - n_tokens)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

    logprobs, entropy = _stats(
        n_chunks, pad(hidden, 0), head_weight, pad(targets, 0), pad(temperature.astype(jnp.float32), 1), banned
    )
    return logprobs[:n_tokens], entropy[:n_tokens]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(
    n_chunks: int, hidden: Array, head_weight: Array, targets: Array, temperature: Array, banned: Array | None
) -> tuple[Array, Array]:
    return _forward(n_chunks, hidden, head_weight, targets, temperature, banned)[0]


def _forward(n_chunks, hidden, head_weight, targets, temperature, banned):
    def body(_, xs):
        h, target, temp = xs
        logp, p = _distribution(h, head_weight, temp, banned)
        picked = jnp.sum(jnp.where(_is_target(target, logp), logp, 0.0), axis=-1)
        return None, (picked, _entropy(logp, p))

    _, stats = jax.lax.scan(body, None, _chunks(n_chunks, hidden, targets, temperature))
    return tuple(_joined(x) for x in stats), (hidden, head_weight, targets, temperature, banned)


def _backward(n_chunks, saved, cotangents):
    """d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy), with z = logits / temperature."""
    hidden, head_weight, targets, temperature, banned = saved
    weight = head_weight.astype(hidden.dtype)

    def body(d_weight, xs):
        h, target, temp, d_logprob, d_entropy = xs
        logp, p = _distribution(h, head_weight, temp, banned)
        surprise = jnp.where(p > 0, logp, 0.0) + _entropy(logp, p)[:, None]
        d_z = d_logprob[:, None] * (_is_target(target, logp) - p) - d_entropy[:, None] * p * surprise
        d_z = (d_z if banned is None else jnp.where(banned, 0.0, d_z)) / temp[:, None]
        d_z = d_z.astype(h.dtype)
        d_h = jnp.einsum("nv,vh->nh", d_z, weight, preferred_element_type=jnp.float32)
        d_weight = d_weight + jnp.einsum("nv,nh->vh", d_z, h, preferred_element_type=jnp.float32)
        return d_weight, d_h.astype(h.dtype)

    start = jnp.zeros(head_weight.shape, jnp.float32)
    xs = _chunks(n_chunks, hidden, targets, temperature, *cotangents)
    d_weight, d_hidden = jax.lax.scan(body, start, xs)
    return _joined(d_hidden), d_weight.astype(head_weight.dtype), None, None, None


_stats.defvjp(_forward, _backward)


def _chunks(n_chunks, *arrays):
    """Chunk i takes every n-th token from i on: where tokens are sharded over devices, each chunk is too."""
    return tuple(x.reshape(-1, n_chunks, *x.shape[1:]).swapaxes(0, 1) for x in arrays)


def _joined(chunks):
    """Undoes `_chunks`."""
    return chunks.swapaxes(0, 1).reshape(-1, *chunks.shape[2:])


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
