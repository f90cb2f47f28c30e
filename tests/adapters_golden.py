"""Golden cases to the project's functions: names, types and layouts only, in float32.

Inputs are padded `[B, T]`; the objectives take rows of segments, so a padded batch gets segment ids of ones and a
value per sequence is spread over its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hermes_jax import objectives as obj
from hermes_jax.models import head
from hermes_jax.objectives import metrics as metric_parts

ARRAYS = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages")


def golden(function: str, inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The outputs of one golden call; NotImplementedError names a function that is not built yet."""
    if function not in FUNCTIONS:
        raise NotImplementedError(f"golden function {function}")
    return FUNCTIONS[function](inputs, params)


def _policy_loss(inputs: dict, params: dict) -> dict:
    return _policy_outputs(_batch(inputs), params)


def _policy_loss_microbatches(inputs: dict, params: dict) -> dict:
    batch, spec = _batch(inputs), _spec(params)
    denominators = _denominators(batch, params)
    parts = [jax.tree.map(lambda x, a=a, b=b: x[a:b], batch) for a, b in params["row_ranges"]]
    losses, _, grads, _ = zip(*(_evaluate(part, spec, denominators) for part in parts), strict=True)
    return {"losses": losses, "total": sum(losses), "grad_logprobs": np.concatenate(grads)}


def _policy_loss_packed(inputs: dict, params: dict) -> dict:
    padded, packed = (_policy_outputs(_batch(inputs[layout]), params) for layout in ("padded", "packed"))
    np.testing.assert_allclose(padded["loss"], packed["loss"], rtol=2e-5, atol=1e-6)
    return {
        "loss": packed["loss"],
        "grad_logprobs_padded": padded["grad_logprobs"],
        "grad_logprobs_packed": packed["grad_logprobs"],
        "metrics": packed["metrics"],
    }


def _overlong_filter_policy_loss(inputs: dict, params: dict) -> dict:
    batch = _batch(inputs)
    truncated = _per_token(inputs["truncated"], batch.loss_mask).astype(bool)
    kept = batch._replace(loss_mask=obj.drop_truncated(batch.loss_mask, truncated))
    return {"mask": kept.loss_mask, **_policy_outputs(kept, params)}


def _aggregate(inputs: dict, params: dict) -> dict:
    mask, segments = _layout(inputs)

    def value(loss: jax.Array) -> jax.Array:
        return obj.safe_divide(
            *obj.aggregate(loss, mask, segments, mode=params["mode"], max_tokens=params.get("max_tokens"))
        )

    result, grad = jax.value_and_grad(value)(_f32(inputs["loss"]))
    return {"value": result, "grad_loss": grad}


def _kl_penalty(inputs: dict, params: dict) -> dict:
    mask, _ = _layout(inputs)

    def penalty(logprobs: jax.Array) -> jax.Array:
        ref = _f32(inputs["ref_logprobs"])
        return obj.kl_penalty(logprobs, ref, mask, kind=params["kind"], clamp=params.get("clamp"))

    logprobs = _f32(inputs["logprobs"])
    return {"kl": penalty(logprobs), "grad_logprobs": jax.grad(lambda x: penalty(x).sum())(logprobs)}


def _kl_in_reward(inputs: dict, params: dict) -> dict:
    mask, segments = _layout(inputs)
    old, ref = _f32(inputs["old_logprobs"]), _f32(inputs["ref_logprobs"])
    options = {"kind": params["kl"], "beta": params["beta"], "clamp": params.get("kl_clamp")}
    if params["level"] == "token":
        return {"token_rewards": obj.kl_in_token_rewards(_f32(inputs["token_rewards"]), old, ref, mask, **options)}
    rewards = _per_token(inputs["rewards"], mask)
    return {"rewards": obj.kl_in_sequence_rewards(rewards, old, ref, mask, segments, **options)[:, 0]}


def _rollout_weights(inputs: dict, params: dict) -> dict:
    mask, segments = _layout(inputs)
    old, rollout = _f32(inputs["old_logprobs"]), _f32(inputs["rollout_logprobs"])
    result = obj.rollout_weights(old, rollout, mask, segments, obj.Correction(**params))
    metrics = obj.finish_metrics(obj.weight_metrics(result, mask) | obj.mismatch_metrics(old, rollout, mask))
    return {"weights": result.weights, "metrics": {k.removeprefix("correction/"): v for k, v in metrics.items()}}


def _group_advantages(inputs: dict, params: dict) -> dict:
    counts = np.asarray(inputs["mask"]).sum(axis=1)
    result = obj.group_advantages(inputs["rewards"], inputs["group_ids"], token_counts=counts, **params)
    return {
        "advantages": result.advantages,
        "degenerate_groups": result.degenerate,
        "valid_count": result.valid.sum(),
    }


def _gae(inputs: dict, params: dict) -> dict:
    mask, segments = _layout(inputs)
    bootstrap = _per_token(inputs.get("bootstrap_values", np.zeros(len(mask))), mask)
    rewards, values = _f32(inputs["token_rewards"]), _f32(inputs["values"])
    advantages, returns = obj.gae(rewards, values, bootstrap, mask, segments, gamma=params["gamma"], lam=params["lam"])
    if params.get("whiten"):
        advantages = obj.whiten(advantages, mask, **_given(params, whiten_eps="eps"))
    return {"advantages": advantages, "returns": returns}


def _place_outcome_reward(inputs: dict, params: dict) -> dict:
    mask, segments = _layout(inputs)
    return {"token_rewards": obj.place_outcome_reward(_per_token(inputs["rewards"], mask), mask, segments)}


def _whiten(inputs: dict, params: dict) -> dict:
    mask, _ = _layout(inputs)
    return {"whitened": obj.whiten(_f32(inputs["x"]), mask, **_given(params, whiten_eps="eps", ddof="ddof"))}


def _value_loss(inputs: dict, params: dict) -> dict:
    mask, segments = _layout(inputs)

    def loss(values: jax.Array) -> tuple[jax.Array, Any]:
        old, returns = _f32(inputs["old_values"]), _f32(inputs["returns"])
        per_token, metrics = obj.value_loss(values, old, returns, mask, clip_value=params.get("clip_value"))
        return obj.safe_divide(*obj.aggregate(per_token, mask, segments, mode=params["aggregation"])), metrics

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(_f32(inputs["values"]))
    return {"loss": value, "grad_values": grad, "metrics": obj.finish_metrics(metrics)}


def _logits_stats(inputs: dict, params: dict) -> dict:
    mask, _ = _layout(inputs)
    targets = jnp.asarray(inputs["tokens"], jnp.int32)
    cotangents = _f32(inputs["cotangent_logprobs"]), _f32(inputs["cotangent_entropy"])

    def scalar(logits: jax.Array) -> tuple[jax.Array, Any]:
        logprobs, entropy = (
            obj.clean(x, mask) for x in _head(logits, targets, mask, **_given(params, temperature="temperature"))
        )
        return sum(jnp.sum(obj.clean(c, mask) * x) for c, x in zip(cotangents, (logprobs, entropy), strict=True)), (
            logprobs,
            entropy,
        )

    logits = _f32(inputs["logits"])
    (value, (logprobs, entropy)), grad = jax.value_and_grad(scalar, has_aux=True)(logits)
    hidden, banned = _hidden(logits, mask)
    shown = jax.vmap(jax.vmap(lambda h, b: head.logits(h, jnp.eye(h.shape[-1]), b)))(hidden, banned)
    picked = jnp.take_along_axis(shown, targets[..., None], axis=-1)[..., 0]
    means = {
        "entropy_mean": metric_parts.masked_mean(entropy, mask),
        "top1_frac": metric_parts.masked_mean(picked == shown.max(axis=-1), mask),
    }
    return {
        "logprobs": logprobs,
        "entropy": entropy,
        "greedy_tokens": jnp.where(mask, shown.argmax(axis=-1), 0),
        "scalar": value,
        "grad_logits": grad,
        "metrics": obj.finish_metrics(obj.Metrics(means, {}, {}, {})),
    }


def _entropy_bonus_loss(inputs: dict, params: dict) -> dict:
    mask, segments = _layout(inputs)
    spec = obj.ObjectiveSpec("reinforce", aggregation=params["aggregation"], entropy_coef=params["coef"])

    def loss(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs, entropy = _head(
            logits, jnp.zeros(mask.shape, jnp.int32), mask, **_given(params, temperature="temperature")
        )
        batch = obj.PolicyBatch(logprobs, mask, segments, jnp.zeros_like(logprobs), entropy=entropy)
        return obj.policy_objective(batch, spec, _denominators(batch, params))[0], obj.clean(entropy, mask)

    (value, entropy), grad = jax.value_and_grad(loss, has_aux=True)(_f32(inputs["logits"]))
    return {"loss": value, "entropy": entropy, "grad_logits": grad}


def _soft_overlong(inputs: dict, params: dict) -> dict:
    return {"penalty": obj.soft_overlong_penalty(jnp.asarray(inputs["lengths"], jnp.int32), **params)}


FUNCTIONS: dict[str, Callable[[dict, dict], dict]] = {
    "policy_loss": _policy_loss,
    "policy_loss_microbatches": _policy_loss_microbatches,
    "policy_loss_packed": _policy_loss_packed,
    "overlong_filter_policy_loss": _overlong_filter_policy_loss,
    "aggregate": _aggregate,
    "kl_penalty": _kl_penalty,
    "kl_in_reward": _kl_in_reward,
    "rollout_weights": _rollout_weights,
    "group_advantages": _group_advantages,
    "gae": _gae,
    "place_outcome_reward": _place_outcome_reward,
    "whiten": _whiten,
    "value_loss": _value_loss,
    "logits_stats": _logits_stats,
    "entropy_bonus_loss": _entropy_bonus_loss,
    "soft_overlong": _soft_overlong,
}


def _policy_outputs(batch: obj.PolicyBatch, params: dict) -> dict:
    loss, metrics, grad, per_token = _evaluate(batch, _spec(params), _denominators(batch, params))
    return {"loss": loss, "grad_logprobs": grad, "per_token_loss": per_token, "metrics": metrics}


def _evaluate(batch: obj.PolicyBatch, spec: obj.ObjectiveSpec, denominators: obj.Denominators) -> tuple:
    """Loss, metrics, gradient and loss per token; not jitted, so that cases of one shape share what is compiled."""

    def loss(logprobs: jax.Array) -> tuple[jax.Array, obj.Metrics]:
        return obj.policy_objective(batch._replace(logprobs=logprobs), spec, denominators)

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(batch.logprobs)
    return value, obj.finish_metrics(metrics), grad, obj.token_losses(batch, spec).loss


def _spec(params: dict) -> obj.ObjectiveSpec:
    """An absent or null parameter means off."""
    correction = params.get("correction")
    off_by_default = ("clip_low", "clip_high", "dual_clip", "log_ratio_clamp", "max_tokens", "kl", "kl_clamp")
    return obj.ObjectiveSpec(
        objective=params["objective"],
        aggregation=params["aggregation"],
        correction=None if correction is None else obj.Correction(**correction),
        **{name: params.get(name) for name in off_by_default},
        **{name: params[name] for name in ("beta", "tau_pos", "tau_neg") if params.get(name) is not None},
    )


def _batch(inputs: dict) -> obj.PolicyBatch:
    mask, segments = _layout(inputs)
    arrays = {name: _per_token(inputs[name], mask) for name in ARRAYS if name in inputs}
    return obj.PolicyBatch(loss_mask=mask, segment_ids=segments, **arrays)


def _denominators(batch: obj.PolicyBatch, params: dict) -> obj.Denominators:
    """Counts of the batch, where the case gives none."""
    counts = obj.count_denominators(batch.loss_mask, batch.segment_ids, params["aggregation"])
    given = {name: params[name] for name in counts._fields if params.get(name) is not None}
    return counts._replace(**{name: jnp.float32(value) for name, value in given.items()})


def _given(params: dict, **names: str) -> dict[str, Any]:
    """The parameters that a case gives, under our names; absent and null ones are left to our defaults."""
    return {ours: params[theirs] for theirs, ours in names.items() if params.get(theirs) is not None}


def _layout(inputs: dict) -> tuple[jax.Array, jax.Array]:
    mask = jnp.asarray(np.asarray(inputs["mask"]) > 0)
    segments = inputs.get("segment_ids", np.ones(mask.shape))
    return mask, jnp.asarray(segments, jnp.int32)


def _per_token(values: np.ndarray, mask: jax.Array) -> jax.Array:
    """A value per sequence on each token of its row; a value per token as it is."""
    array = _f32(values)
    return array if array.ndim == mask.ndim else jnp.broadcast_to(array[:, None], mask.shape)


def _head(
    logits: jax.Array, targets: jax.Array, mask: jax.Array, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """The LM head with the identity as its weight (hidden states are logits); one call per token, for bans differ."""

    def one(hidden: jax.Array, target: jax.Array, banned: jax.Array) -> tuple[jax.Array, jax.Array]:
        stats = head.token_stats(hidden[None], jnp.eye(hidden.size), target[None], jnp.full(1, temperature), banned)
        return stats[0][0], stats[1][0]

    hidden, banned = _hidden(logits, mask)
    return jax.vmap(jax.vmap(one))(hidden, targets, banned)


def _hidden(logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    generated = mask[..., None]
    return obj.clean(logits, generated & jnp.isfinite(logits)), generated & jnp.isneginf(logits)


def _f32(values: np.ndarray) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.float64), jnp.float32)
