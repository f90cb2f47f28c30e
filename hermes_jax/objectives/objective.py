"""The composed objective: the function that an update differentiates."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hermes_jax.objectives.aggregation import Denominators, aggregate
from hermes_jax.objectives.correction import RolloutWeights, mismatch_metrics, rollout_weights, weight_metrics
from hermes_jax.objectives.kl import kl_penalty
from hermes_jax.objectives.metrics import Metrics, masked_max, masked_mean, masked_min, no_metrics
from hermes_jax.objectives.policy import Surrogate
from hermes_jax.objectives.segments import clean, safe_divide
from hermes_jax.objectives.spec import ObjectiveSpec
from hermes_jax.objectives.user_loss import call_loss


class PolicyBatch(NamedTuple):
    """What the objective sees of a (micro-)batch; every array is `[rows, width]`, aligned with the tokens.

    Attributes:
        logprobs: under the policy that is trained; the gradient flows through these (and `entropy`).
        loss_mask: tokens that count. Elsewhere every other array may hold anything, NaN and infinity included.
        segment_ids: 1-based within a row, 0 = padding; all ones for one sequence per row.
        advantages: per token, or a sequence's advantage on each of its tokens.
        old_logprobs: under the policy at the start of the update; None = the present policy (ratio 1).
        ref_logprobs: under the reference model; needed where the spec has a KL term.
        rollout_logprobs: as the serving engine reported them; NaN = not reported. Needed for a correction.
        entropy: of the policy's next-token distribution, in nats; needed for an entropy bonus, else only measured.
        positions: place of the token in its sequence, from 0.
        turn: number of the model's turn that the token belongs to, from 0; -1 where it was not sampled.
        policy_version: version of the weights that sampled the token; -1 where it was not sampled.
        temperature: at which the token was sampled.
    """

    logprobs: Float[Array, "rows width"]
    loss_mask: Bool[Array, "rows width"]
    segment_ids: Int[Array, "rows width"]
    advantages: Float[Array, "rows width"]
    old_logprobs: Float[Array, "rows width"] | None = None
    ref_logprobs: Float[Array, "rows width"] | None = None
    rollout_logprobs: Float[Array, "rows width"] | None = None
    entropy: Float[Array, "rows width"] | None = None
    positions: Int[Array, "rows width"] | None = None
    turn: Int[Array, "rows width"] | None = None
    policy_version: Int[Array, "rows width"] | None = None
    temperature: Float[Array, "rows width"] | None = None


class TokenLosses(NamedTuple):
    """Loss per token before aggregation, with the parts that made it."""

    loss: Float[Array, "rows width"]
    surrogate: Surrogate
    old_logprobs: Float[Array, "rows width"]
    rollout: RolloutWeights | None


def policy_objective(
    batch: PolicyBatch, spec: ObjectiveSpec, denominators: Denominators
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a micro-batch, as its share of the whole update's loss, and its metrics.

    `loss = agg(weight * surrogate) + beta * agg(kl) - entropy_coef * agg(entropy)`, each term divided by the
    denominators of the *whole* update: losses, gradients and `finish_metrics` of the micro-batches simply add up,
    however the batch is cut, packed or sharded.

    Args:
        batch: arrays of the micro-batch.
        spec: static under jit.
        denominators: `count_denominators` of the whole update (or counts of your own).

    Raises:
        ValueError: when an array that the spec needs is missing, or shapes differ.
    """
    check_batch(batch, spec)
    tokens = token_losses(batch, spec)
    loss = _reduce(tokens.loss, batch, spec, denominators)
    metrics = _surrogate_metrics(tokens, batch)
    metrics.sums["policy_loss"] = loss
    if spec.kl is not None:
        kl = kl_penalty(batch.logprobs, _given(batch.ref_logprobs), batch.loss_mask, kind=spec.kl, clamp=spec.kl_clamp)
        kl_loss = _reduce(kl, batch, spec, denominators)
        metrics.sums["kl_loss"] = kl_loss
        metrics.means["kl_mean"] = masked_mean(kl, batch.loss_mask)
        loss = loss + spec.beta * kl_loss if spec.beta else loss
    if batch.entropy is not None:
        metrics.means["entropy_mean"] = masked_mean(batch.entropy, batch.loss_mask)
        if spec.entropy_coef:
            loss = loss - spec.entropy_coef * _reduce(batch.entropy, batch, spec, denominators)
    return loss, metrics | _correction_metrics(tokens, batch)


def token_losses(batch: PolicyBatch, spec: ObjectiveSpec) -> TokenLosses:
    """Surrogate times correction weight per token, 0 outside the mask; without KL and entropy."""
    logprobs = clean(batch.logprobs, batch.loss_mask)
    old = lax.stop_gradient(logprobs if batch.old_logprobs is None else clean(batch.old_logprobs, batch.loss_mask))
    surrogate = _surrogate(batch._replace(logprobs=logprobs, old_logprobs=old), spec)
    if spec.correction is None:
        return TokenLosses(clean(surrogate.loss, batch.loss_mask), surrogate, old, None)
    rollout = rollout_weights(old, _given(batch.rollout_logprobs), batch.loss_mask, batch.segment_ids, spec.correction)
    return TokenLosses(clean(rollout.weights * surrogate.loss, batch.loss_mask), surrogate, old, rollout)


def check_batch(batch: PolicyBatch, spec: ObjectiveSpec) -> None:
    """Raises ValueError when an array that the spec needs is missing, or one has another shape than the mask."""
    needed = {
        "ref_logprobs": ("a KL term", spec.kl is not None),
        "rollout_logprobs": ("a rollout correction", spec.correction is not None),
        "entropy": ("an entropy bonus", spec.entropy_coef != 0),
    }
    for name, (purpose, wanted) in needed.items():
        if wanted and getattr(batch, name) is None:
            raise ValueError(
                f"the objective has {purpose} but the batch has no {name}: score it first, or switch it off"
            )
    shape = jnp.shape(batch.loss_mask)
    for name, array in batch._asdict().items():
        if array is not None and jnp.shape(array) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(array)}, loss_mask {shape}; all arrays are [rows, width]")


def _surrogate(batch: PolicyBatch, spec: ObjectiveSpec) -> Surrogate:
    """Calls the loss with the arrays and options that it names; floating-point ones are 0 outside the mask.

    A rollout log-prob that is not known is the old one, as in a correction: no difference.
    """
    arrays = {name: getattr(batch, name) for name in spec.arrays}
    if (rollout := arrays.get("rollout_logprobs")) is not None:
        arrays["rollout_logprobs"] = jnp.where(jnp.isfinite(rollout), rollout, _given(batch.old_logprobs))
    for name, array in arrays.items():
        if array is not None and jnp.issubdtype(array.dtype, jnp.floating):
            arrays[name] = clean(array, batch.loss_mask)
    return call_loss(spec.function, arrays, {name: getattr(spec, name) for name in spec.options}, batch.loss_mask.shape)


def _reduce(per_token: Array, batch: PolicyBatch, spec: ObjectiveSpec, denominators: Denominators) -> Array:
    total, denominator = aggregate(
        per_token,
        batch.loss_mask,
        batch.segment_ids,
        mode=spec.aggregation,
        max_tokens=spec.max_tokens,
        denominators=denominators,
    )
    return safe_divide(total, denominator)


def _surrogate_metrics(tokens: TokenLosses, batch: PolicyBatch) -> Metrics:
    """Clip fractions, ratio and approximate KL to the old policy, over the tokens of the loss."""
    mask, surrogate = batch.loss_mask, tokens.surrogate
    never = jnp.zeros_like(mask)
    high, low, dual = (
        never if flag is None else flag
        for flag in (surrogate.clipped_high, surrogate.clipped_low, surrogate.dual_clipped)
    )
    means = {
        "clip_frac": masked_mean(high | low, mask),
        "clip_frac_high": masked_mean(high, mask),
        "clip_frac_low": masked_mean(low, mask),
        "dual_clip_frac": masked_mean(dual, mask),
        "approx_kl_k1": masked_mean(tokens.old_logprobs - clean(batch.logprobs, mask), mask),
    }
    means |= {f"policy_loss/{name}": masked_mean(value, mask) for name, value in (surrogate.metrics or {}).items()}
    if surrogate.ratio is None:
        return Metrics(means, {}, {}, {})
    ratio = surrogate.ratio
    means["ratio_mean"] = masked_mean(ratio, mask)
    maxima = {"ratio_max": masked_max(ratio, mask), "ratio_deviation_max": masked_max(jnp.abs(ratio - 1), mask)}
    return Metrics(means, {}, {"ratio_min": masked_min(ratio, mask)}, maxima)


def _correction_metrics(tokens: TokenLosses, batch: PolicyBatch) -> Metrics:
    metrics = no_metrics()
    if batch.rollout_logprobs is not None:
        metrics |= mismatch_metrics(tokens.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
    return metrics if tokens.rollout is None else metrics | weight_metrics(tokens.rollout, batch.loss_mask)


def _given(array: Array | None) -> Array:
    assert array is not None, "check_batch has seen to it"
    return array
