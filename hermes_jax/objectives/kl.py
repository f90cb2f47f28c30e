"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, in the loss and in the reward.

With `d = logprob - ref_logprob`: `k1 = d`, `k2 = d^2 / 2`, `k3 = exp(-d) - 1 + d` (J. Schulman, "Approximating KL
divergence", 2020), `abs = |d|`. Which gradient an estimator has in expectation depends on where it stands
(arXiv:2506.09477): in a loss it is differentiated, in a reward it is a number that weighs the gradient of the log-prob.

| kind | in the loss: the gradient of | in the reward: the gradient of |
|---|---|---|
| `k1` | nothing (noise without a pull) | KL(policy, ref): the one to choose |
| `k2` | KL(policy, ref) | no KL |
| `k3` | KL(ref, policy) | KL(policy, ref) - KL(ref, policy) |
| `abs` | sum of abs(policy - ref), twice the total variation | no KL |

All of this holds on tokens of the policy itself, so in the first pass over a batch.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hermes_jax.objectives.segments import clean, segment_totals

KL_KINDS = ("k1", "k2", "k3", "abs")


def kl_estimate(log_ratio: Float[Array, "*shape"], *, kind: str, clamp: float | None = None) -> Float[Array, "*shape"]:
    """The estimator `kind` at `log_ratio = logprob - ref_logprob`, clipped to `[-clamp, clamp]`.

    The derivative is 0 beyond the clamp. Without a clamp k3 overflows fp32 once the policy is about 88 nats below the
    reference. Raises ValueError for an unknown kind.
    """
    if clamp is None:
        return _estimate(log_ratio, kind)
    value = _estimate(log_ratio, kind)
    beyond = jnp.abs(value) > clamp
    # The estimate is taken again at inputs known to be tame: exp of a clamped entry must not meet the backward pass.
    inside = _estimate(jnp.where(beyond, 0.0, log_ratio), kind)
    return jnp.where(beyond, jnp.copysign(clamp, value), inside)


def kl_penalty(
    logprobs: Float[Array, "*rows width"],
    ref_logprobs: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
    *,
    kind: str,
    clamp: float | None = None,
) -> Float[Array, "*rows width"]:
    """KL estimate per token, 0 outside the mask, whatever stands there."""
    log_ratio = clean(logprobs, loss_mask) - clean(ref_logprobs, loss_mask)
    return kl_estimate(log_ratio, kind=kind, clamp=clamp)


def kl_in_token_rewards(
    token_rewards: Float[Array, "*rows width"],
    old_logprobs: Float[Array, "*rows width"],
    ref_logprobs: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
    *,
    kind: str,
    beta: float,
    clamp: float | None = None,
) -> Float[Array, "*rows width"]:
    """`reward_t - beta * kl_t` on each generated token, 0 elsewhere (Ziegler et al., arXiv:1909.08593)."""
    return clean(token_rewards, loss_mask) - beta * kl_penalty(
        old_logprobs, ref_logprobs, loss_mask, kind=kind, clamp=clamp
    )


def kl_in_sequence_rewards(
    rewards: Float[Array, "*rows width"],
    old_logprobs: Float[Array, "*rows width"],
    ref_logprobs: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
    segment_ids: Int[Array, "*rows width"],
    *,
    kind: str,
    beta: float,
    clamp: float | None = None,
) -> Float[Array, "*rows width"]:
    """`R_i - beta * sum_t kl_t`: `rewards` holds each sequence's reward on its tokens, and so does the result."""
    penalty = kl_penalty(old_logprobs, ref_logprobs, loss_mask, kind=kind, clamp=clamp)
    return rewards - beta * segment_totals(penalty, segment_ids)


def kl_on_host(log_ratio: Float[np.ndarray, "*shape"], *, kind: str) -> Float[np.ndarray, "*shape"]:
    """`kl_estimate` in numpy float64, for rewards: these are made on the host, where nothing may wait for a device."""
    d = np.asarray(log_ratio, np.float64)
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_KINDS)}")
    return {"k1": d, "k2": 0.5 * d * d, "k3": np.expm1(-d) + d, "abs": np.abs(d)}[kind]


def _estimate(d: Float[Array, "*shape"], kind: str) -> Float[Array, "*shape"]:
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return jnp.expm1(-d) + d  # exp(-d) - 1 + d loses every digit near d = 0
    if kind == "abs":
        return d * lax.stop_gradient(jnp.sign(d))  # slope 0 at the reference, where jnp.abs has slope 1
    raise ValueError(f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_KINDS)}")
