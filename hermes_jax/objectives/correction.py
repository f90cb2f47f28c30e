"""Weights that correct for the serving engine's log-probs differing from the trainer's own.

`d = old - rollout` on generated tokens, where `old` is the trainer's recomputation; a token whose rollout log-prob is
not known (NaN or infinite: the engine did not report it) has `d = 0`. The ratio of a mode is

* `token`: `exp(d)` (truncated: TIS, F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL
  training", 2025; masked: IcePop, arXiv:2510.18855);
* `product`: `exp(sum of d)` over the sequence, `geometric`: `exp(mean of d)` (J. Liu et al., "When speed kills
  stability", 2025).

Weights carry no gradient and multiply the loss per token before aggregation. Denominators do not change: a token with
weight 0 still counts. If `old` is a copy of the rollout's log-probs, every weight is 1 and the mismatch sits in the
clipped ratio instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hermes_jax.objectives.metrics import Metrics, masked_max, masked_mean, masked_min
from hermes_jax.objectives.segments import clean, segment_means, segment_totals

CORRECTION_MODES = (
    "token_truncate",
    "token_mask",
    "sequence_truncate_product",
    "sequence_truncate_geometric",
    "sequence_mask_product",
    "sequence_mask_geometric",
)
KEEP_WEIGHTS = ("ratio", "one")


@dataclass(frozen=True)
class Correction:
    """Which ratio is used and how it is bounded.

    `*_truncate`: weight `min(ratio, max)`. `*_mask`: the ratio (with `keep_weight="one"`: 1) where
    `low <= ratio <= high`, else 0. A bound that is None does not bind.
    """

    mode: str
    max: float | None = None
    low: float | None = None
    high: float | None = None
    keep_weight: str = "ratio"

    def __post_init__(self) -> None:
        if self.mode not in CORRECTION_MODES:
            raise ValueError(f"unknown correction mode {self.mode!r}; choose one of {', '.join(CORRECTION_MODES)}")
        if self.keep_weight not in KEEP_WEIGHTS:
            raise ValueError(
                f"correction keep_weight must be one of {', '.join(KEEP_WEIGHTS)}, got {self.keep_weight!r}"
            )
        unused = ("low", "high") if self.truncates else ("max",)
        if given := [name for name in unused if getattr(self, name) is not None]:
            raise ValueError(f"correction mode {self.mode!r} does not use {' and '.join(given)}; remove it")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"correction low={self.low} lies above high={self.high}: no weight would survive")

    @property
    def truncates(self) -> bool:
        """Whether the ratio is cut at `max` (else: set to 0 outside an interval)."""
        return "truncate" in self.mode

    def __str__(self) -> str:
        ratio = {"product": "exp(sum(old - rollout))", "geometric": "exp(mean(old - rollout))"}.get(
            self.mode.rsplit("_", 1)[-1], "exp(old - rollout)"
        )
        if self.truncates:
            return ratio if self.max is None else f"min({ratio}, {self.max:g})"
        low, high = ("-inf" if self.low is None else f"{self.low:g}", "inf" if self.high is None else f"{self.high:g}")
        kept = ratio if self.keep_weight == "ratio" else "1"
        return f"({kept} if {ratio} in [{low}, {high}] else 0)"


class RolloutWeights(NamedTuple):
    """Weight per token (0 outside the mask), and whether it was truncated or zeroed."""

    weights: Float[Array, "*rows width"]
    affected: Bool[Array, "*rows width"]


def rollout_weights(
    old_logprobs: Float[Array, "*rows width"],
    rollout_logprobs: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
    segment_ids: Int[Array, "*rows width"],
    correction: Correction,
) -> RolloutWeights:
    """The weights of `correction`, without gradient. Bounds are inclusive; NaN outside the mask is harmless."""
    log_ratio, _ = _log_ratio(old_logprobs, rollout_logprobs, loss_mask)
    if correction.mode.endswith("product"):
        log_ratio = segment_totals(log_ratio, segment_ids)
    elif correction.mode.endswith("geometric"):
        log_ratio = segment_means(log_ratio, loss_mask, segment_ids)
    ratio = _finite_exp(log_ratio)
    affected = jnp.zeros_like(loss_mask)
    for bound, outside in (
        (correction.max, jnp.greater),
        (correction.high, jnp.greater),
        (correction.low, jnp.less),
    ):
        affected = affected if bound is None else affected | outside(ratio, bound)
    if correction.truncates:
        weights = ratio if correction.max is None else jnp.minimum(ratio, correction.max)
    else:
        weights = jnp.where(affected, 0.0, 1.0 if correction.keep_weight == "one" else ratio)
    return RolloutWeights(lax.stop_gradient(clean(weights, loss_mask)), affected & loss_mask)


def weight_metrics(rollout: RolloutWeights, loss_mask: Bool[Array, "*rows width"]) -> Metrics:
    """How strong the correction was, over generated tokens."""
    return Metrics(
        means={
            "correction/affected_frac": masked_mean(rollout.affected, loss_mask),
            "correction/weight_mean": masked_mean(rollout.weights, loss_mask),
            "correction/weight_square_mean": masked_mean(rollout.weights**2, loss_mask),
        },
        sums={},
        minima={"correction/weight_min": masked_min(rollout.weights, loss_mask)},
        maxima={"correction/weight_max": masked_max(rollout.weights, loss_mask)},
    )


def effective_sample_size(finished: Mapping[str, Float[Array, ""]]) -> dict[str, Float[Array, ""]]:
    """Kish's `(sum w)^2 / (n sum w^2)` of the finished `weight_metrics`: the share of the tokens that still counts.

    1 for equal weights, near 0 where a few tokens carry the update, 0 where every weight is 0; none without weights.
    """
    if "correction/weight_mean" not in finished:
        return {}
    mean, square = finished["correction/weight_mean"], finished["correction/weight_square_mean"]
    return {"correction/effective_sample_size": jnp.where(square > 0, mean**2 / jnp.where(square > 0, square, 1), 0.0)}


def mismatch_metrics(
    old_logprobs: Float[Array, "*rows width"],
    rollout_logprobs: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
) -> Metrics:
    """How far the engine's log-probs are from the trainer's, over tokens whose rollout log-prob is known.

    `mismatch_k1 = mean(rollout - old)` and `mismatch_k3 = mean(exp(d) - 1 - d)` estimate KL(rollout || old).
    """
    d, known = _log_ratio(old_logprobs, rollout_logprobs, loss_mask)
    return Metrics(
        means={
            "correction/logprob_diff_abs_mean": masked_mean(jnp.abs(d), known),
            "correction/mismatch_k1": masked_mean(-d, known),
            "correction/mismatch_k3": masked_mean(jnp.expm1(_exponent(d)) - d, known),
        },
        sums={},
        minima={},
        maxima={"correction/logprob_diff_abs_max": masked_max(jnp.abs(d), known)},
    )


def _log_ratio(old: Array, rollout: Array, loss_mask: Array) -> tuple[Float[Array, "*rows width"], Array]:
    known = loss_mask & jnp.isfinite(rollout)
    return clean(old, known) - clean(rollout, known), known


def _exponent(log_ratio: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    # 80 in fp32: an absurd weight stays a finite number, which means and JSON can hold.
    bound = 0.9 * math.log(float(jnp.finfo(log_ratio.dtype).max))
    return jnp.clip(log_ratio, -bound, bound)


def _finite_exp(log_ratio: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    return jnp.exp(_exponent(log_ratio))
