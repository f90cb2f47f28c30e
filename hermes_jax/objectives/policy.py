"""Surrogate losses per token, to be minimised (the minus sign is inside).

Notation: `lp` = log-prob under the policy that is trained, `old` = under the policy at the start of the update,
`A` = advantage, `r = exp(guard(lp - old))`. The guard clips an exponent to `[-log_ratio_clamp, log_ratio_clamp]` with
derivative 0 beyond; without it a ratio can overflow and turn the gradient into NaN.

Each function takes what it names: arrays `[..., rows, width]` (`logprobs`, `old_logprobs`, `advantages`, `loss_mask`,
`segment_ids`; clean, see `segments.clean`) and options as keywords. A function of your own with names from the same
list can stand in an `ObjectiveSpec` as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hermes_jax.objectives.segments import segment_means


class Surrogate(NamedTuple):
    """A loss per token and what the metrics need to know about it; None where a notion does not exist."""

    loss: Float[Array, "*rows width"]
    ratio: Float[Array, "*rows width"] | None = None
    clipped_high: Bool[Array, "*rows width"] | None = None
    clipped_low: Bool[Array, "*rows width"] | None = None
    dual_clipped: Bool[Array, "*rows width"] | None = None
    metrics: dict[str, Float[Array, "*rows width"]] | None = None


def guard(log_ratio: Float[Array, "*shape"], bound: float | None) -> Float[Array, "*shape"]:
    """`log_ratio` clipped to `[-bound, bound]`, derivative 0 beyond and 1 on the bound; None = unbounded."""
    if bound is None:
        return log_ratio
    return jnp.where(jnp.abs(log_ratio) > bound, jnp.copysign(bound, log_ratio), log_ratio)


def clip_loss(
    logprobs: Float[Array, "*rows width"],
    old_logprobs: Float[Array, "*rows width"],
    advantages: Float[Array, "*rows width"],
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
) -> Surrogate:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; with `dual_clip = c` and `A < 0` at most `-c A`.

    PPO arXiv:1707.06347, GRPO arXiv:2402.03300, separate bounds DAPO arXiv:2503.14476, dual clip arXiv:1912.09729. The
    two-sided clipping of INTELLECT-2 (arXiv:2505.07291), `-min(min(r, delta) A, clip(r) A)`, is `dual_clip = delta`.
    """
    ratio = jnp.exp(guard(logprobs - old_logprobs, log_ratio_clamp))
    return _clipped(ratio, advantages, clip_low, clip_high, dual_clip)


def gspo_loss(
    logprobs: Float[Array, "*rows width"],
    old_logprobs: Float[Array, "*rows width"],
    advantages: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
    segment_ids: Int[Array, "*rows width"],
    *,
    clip_low: float | None,
    clip_high: float | None,
    log_ratio_clamp: float | None = None,
) -> Surrogate:
    """`clip_loss` with the sequence's ratio `s_i = exp(guard(mean_t(lp - old)))` in place of `r` (arXiv:2507.18071).

    The gradient of `s_i` reaches every generated token of the sequence. Usual bounds are 3e-4 and 4e-4.
    """
    ratio = _sequence_ratio(logprobs, old_logprobs, loss_mask, segment_ids, log_ratio_clamp)
    return _clipped(ratio, advantages, clip_low, clip_high)


def gspo_token_loss(
    logprobs: Float[Array, "*rows width"],
    old_logprobs: Float[Array, "*rows width"],
    advantages: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
    segment_ids: Int[Array, "*rows width"],
    *,
    clip_low: float | None,
    clip_high: float | None,
    log_ratio_clamp: float | None = None,
) -> Surrogate:
    """Value of `gspo_loss`, gradient through the token's own log-prob only (arXiv:2507.18071, section 4.3).

    `s_it = sg(s_i) exp(lp - sg(lp))`. The two differ for advantages per token.
    """
    sequence_ratio = _sequence_ratio(logprobs, old_logprobs, loss_mask, segment_ids, log_ratio_clamp)
    ratio = lax.stop_gradient(sequence_ratio) * jnp.exp(logprobs - lax.stop_gradient(logprobs))
    return _clipped(ratio, advantages, clip_low, clip_high)


def cispo_loss(
    logprobs: Float[Array, "*rows width"],
    old_logprobs: Float[Array, "*rows width"],
    advantages: Float[Array, "*rows width"],
    *,
    clip_low: float | None,
    clip_high: float | None,
    log_ratio_clamp: float | None = None,
) -> Surrogate:
    """`-sg(w) A lp`, `w = r` bounded by `1 + clip_high` and, if given, `1 - clip_low`, for both signs of `A`.

    MiniMax-M1 arXiv:2506.13585 (no lower bound: `clip_low=None`), ScaleRL arXiv:2510.13786.
    """
    ratio = jnp.exp(guard(logprobs - old_logprobs, log_ratio_clamp))
    high, low = _outside(ratio, clip_low, clip_high)
    weight = lax.stop_gradient(_bounded(ratio, high, low, clip_low, clip_high))
    return Surrogate(-weight * advantages * logprobs, ratio, high, low)


def reinforce_loss(logprobs: Float[Array, "*rows width"], advantages: Float[Array, "*rows width"]) -> Surrogate:
    """`-A lp` (Williams 1992). With `A = 1` this is the cross-entropy of supervised fine-tuning."""
    return Surrogate(-advantages * logprobs)


def sapo_loss(
    logprobs: Float[Array, "*rows width"],
    old_logprobs: Float[Array, "*rows width"],
    advantages: Float[Array, "*rows width"],
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    log_ratio_clamp: float | None = None,
) -> Surrogate:
    """`-(4 / tau) sigmoid(tau (r - 1)) A`, `tau = tau_pos if A > 0 else tau_neg` (SAPO arXiv:2511.20347)."""
    ratio = jnp.exp(guard(logprobs - old_logprobs, log_ratio_clamp))
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    return Surrogate(-(4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1)) * advantages, ratio)


def gmpo_loss(
    logprobs: Float[Array, "*rows width"],
    old_logprobs: Float[Array, "*rows width"],
    advantages: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
    segment_ids: Int[Array, "*rows width"],
    *,
    clip_low: float | None,
    clip_high: float | None,
    log_ratio_clamp: float | None = None,
) -> Surrogate:
    """`-g_i A`, `g_i` = geometric mean over the sequence of the clipped ratios of its tokens (GMPO arXiv:2507.20673).

    A token's ratio is bounded by `1 + clip_high` if `A > 0`, by `1 - clip_low` from below if `A < 0`, before the mean.
    The paper's range is `exp(-0.4)` to `exp(0.4)`: `clip_low` 0.33, `clip_high` 0.49.
    """
    ratio = jnp.exp(guard(logprobs - old_logprobs, log_ratio_clamp))
    above, below = _outside(ratio, clip_low, clip_high)
    high, low = above & (advantages > 0), below & (advantages < 0)
    bounded = jnp.log(_bounded(ratio, high, low, clip_low, clip_high))
    sequence_ratio = jnp.exp(segment_means(bounded, loss_mask, segment_ids))
    return Surrogate(-sequence_ratio * advantages, sequence_ratio, high, low)


def dppo_loss(
    logprobs: Float[Array, "*rows width"],
    old_logprobs: Float[Array, "*rows width"],
    advantages: Float[Array, "*rows width"],
    *,
    tv_max: float = 0.15,
    log_ratio_clamp: float | None = None,
) -> Surrogate:
    """`-M r A`: tokens are masked instead of clipped, by probability rather than by ratio (DPPO arXiv:2602.04879).

    `M = 0` where the token's probability moved by more than `tv_max` in the direction of its advantage:
    `|p - p_old| > tv_max`, and `r > 1` if `A > 0`, `r < 1` if `A < 0`; else 1. A rare token may double, a likely one
    may not fall far.
    """
    ratio = jnp.exp(guard(logprobs - old_logprobs, log_ratio_clamp))
    far = jnp.abs(jnp.exp(logprobs) - jnp.exp(old_logprobs)) > tv_max
    high, low = far & (ratio > 1) & (advantages > 0), far & (ratio < 1) & (advantages < 0)
    return Surrogate(jnp.where(high | low, 0.0, -ratio * advantages), ratio, high, low)


OBJECTIVES: dict[str, Callable[..., Surrogate]] = {
    "clip": clip_loss,
    "gspo": gspo_loss,
    "gspo_token": gspo_token_loss,
    "cispo": cispo_loss,
    "reinforce": reinforce_loss,
    "sapo": sapo_loss,
    "gmpo": gmpo_loss,
    "dppo": dppo_loss,
}


def _sequence_ratio(
    logprobs: Array, old_logprobs: Array, loss_mask: Array, segment_ids: Array, clamp: float | None
) -> Float[Array, "*rows width"]:
    return jnp.exp(guard(segment_means(logprobs - old_logprobs, loss_mask, segment_ids), clamp))


def _clipped(
    ratio: Array, advantages: Array, clip_low: float | None, clip_high: float | None, dual_clip: float | None = None
) -> Surrogate:
    """Branch by branch rather than by `min`, whose derivative at a tie would be split between the branches.

    A ratio exactly on an edge is not clipped: it keeps its gradient.
    """
    above, below = _outside(ratio, clip_low, clip_high)
    high, low = above & (advantages > 0), below & (advantages < 0)
    bounded = _bounded(ratio, high, low, clip_low, clip_high)
    if dual_clip is None:
        return Surrogate(-bounded * advantages, ratio, high, low)
    dual = (ratio > dual_clip) & (advantages < 0)
    return Surrogate(-jnp.where(dual, dual_clip, bounded) * advantages, ratio, high, low, dual)


def _outside(ratio: Array, clip_low: float | None, clip_high: float | None) -> tuple[Array, Array]:
    nowhere = jnp.zeros_like(ratio, dtype=bool)
    above = nowhere if clip_high is None else ratio > 1 + clip_high
    return above, nowhere if clip_low is None else ratio < 1 - clip_low


def _bounded(ratio: Array, high: Array, low: Array, clip_low: float | None, clip_high: float | None) -> Array:
    bounded = jnp.where(high, 1 + (clip_high or 0.0), ratio)
    return jnp.where(low, 1 - (clip_low or 0.0), bounded)
