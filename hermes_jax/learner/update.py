"""One optimizer update: a pure, jitted function of the train state and a packed batch.

Micro-batches are a scan inside it. Every micro-batch divides by the denominators of the whole update, so that gradients
add up to the same sum however the batch is cut, packed or sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float

from hermes_jax.data.packing import PackedBatch
from hermes_jax.learner.batch_function import BatchFunction
from hermes_jax.learner.logprobs import ForwardOptions, token_logprobs
from hermes_jax.learner.mesh import batch_spec, param_shardings, replicated
from hermes_jax.learner.optimizer import Optimizer, clip_factor
from hermes_jax.learner.state import TrainState, state_shardings
from hermes_jax.models.config import ModelConfig
from hermes_jax.models.transformer import abstract_params
from hermes_jax.objectives.aggregation import Denominators, count_denominators
from hermes_jax.objectives.correction import effective_sample_size
from hermes_jax.objectives.kl import kl_penalty
from hermes_jax.objectives.metrics import Metrics, finish_metrics, masked_mean
from hermes_jax.objectives.objective import PolicyBatch, policy_objective
from hermes_jax.objectives.spec import ObjectiveSpec

Scalars = dict[str, Float[Array, ""]]
UpdateStep = BatchFunction
Gradient = Callable[[Any, PackedBatch], tuple[Float[Array, ""], Any, Scalars]]

OPTIONAL = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
"""Arrays of a batch that may be unknown."""


def make_update_step(
    config: ModelConfig,
    spec: ObjectiveSpec,
    optimizer: Optimizer,
    mesh: Mesh,
    options: ForwardOptions,
    *,
    known: Collection[str] = ("old_logprobs", "rollout_logprobs"),
) -> UpdateStep:
    """Builds `update_step(state, batch) -> (state, metrics)`; the state that goes in is donated, its arrays are gone.

    If loss or gradient is not finite, parameters, moments and schedule stay bitwise as they were and the update counts
    as skipped.

    Args:
        config: the model; `state.params` are its fp32 masters.
        spec: what is minimised. `reinforce` with advantage 1 is supervised fine-tuning on the loss mask.
        optimizer: from `make_optimizer`.
        mesh: where the state lies; rows of the batch are spread over its data and fsdp axes.
        options: how the model is run.
        known: which of `OPTIONAL` the batch holds. Without `old_logprobs` the present policy stands for it (ratio 1).

    Returns:
        The jitted function. Its metrics are fp32 scalars: those of the objective, and `loss`, `grad_norm` (before
        clipping), `learning_rate`, `num_tokens` and `num_sequences` of the loss, `update_skipped` (0 or 1).
    """
    gradient = make_gradient(config, spec, mesh, options, known=known)
    shardings = state_shardings(abstract_params(config), optimizer, mesh, config)
    rows = NamedSharding(mesh, batch_spec())

    @partial(jax.jit, donate_argnums=0, in_shardings=(shardings, rows), out_shardings=(shardings, replicated(mesh)))
    def update_step(state: TrainState, batch: PackedBatch) -> tuple[TrainState, Scalars]:
        loss, grads, metrics = gradient(state.params, batch)
        norm = optax.tree_utils.tree_norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        moved = _apply(state, grads, norm, optimizer)
        metrics |= {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(optimizer.learning_rate(state.update), jnp.float32),
            "update_skipped": (~finite).astype(jnp.float32),
        }
        return _choose(finite, moved, state), metrics

    return UpdateStep(update_step, mesh)


def make_gradient(
    config: ModelConfig,
    spec: ObjectiveSpec,
    mesh: Mesh,
    options: ForwardOptions,
    *,
    known: Collection[str] = ("old_logprobs", "rollout_logprobs"),
) -> Gradient:
    """Builds `gradient(params, batch) -> (loss, fp32 gradient, metrics)` of a whole update, not jitted; see there."""
    if unknown := set(known) - set(OPTIONAL):
        raise ValueError(f"known may name {', '.join(OPTIONAL)}; not {', '.join(sorted(unknown))}")
    shardings = param_shardings(abstract_params(config), mesh, config)

    def objective(batch: PackedBatch, stats: tuple[Array, Array], denominators: Denominators) -> tuple[Array, Metrics]:
        view = _objective_view(batch, *stats, known)
        loss, metrics = policy_objective(view, spec, denominators)
        return loss, metrics | _reference_metrics(view)

    def micro_loss(params: Any, batch: PackedBatch, denominators: Denominators) -> tuple[Array, Metrics]:
        return objective(batch, token_logprobs(params, config, batch, options), denominators)

    def gradient(params: Any, batch: PackedBatch) -> tuple[Array, Any, Scalars]:
        denominators = count_denominators(batch.loss_mask, batch.segment_ids, spec.aggregation)
        start = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

        def work(micro: PackedBatch) -> tuple[tuple[Array, Metrics], Any]:
            return jax.value_and_grad(micro_loss, has_aux=True)(params, micro, denominators)

        def nothing(micro: PackedBatch) -> tuple[tuple[Array, Metrics], Any]:
            zeros = jnp.zeros(micro.tokens.shape, jnp.float32)
            return objective(micro, (zeros, zeros), denominators), jax.tree.map(jnp.zeros_like, params)

        def add(total: Any, micro: PackedBatch) -> tuple[Any, tuple[Array, Metrics]]:
            value, grads = jax.lax.cond(micro.loss_mask.any(), work, nothing, micro)  # padding costs no forward pass
            total = jax.tree.map(lambda sum_, grad: sum_ + grad.astype(jnp.float32), total, grads)
            return jax.lax.with_sharding_constraint(total, shardings), value

        grads, (losses, metrics) = jax.lax.scan(add, start, batch)
        finished = finish_metrics(metrics)
        return jnp.sum(losses), grads, finished | effective_sample_size(finished) | _counts(denominators)

    return gradient


def _objective_view(batch: PackedBatch, logprobs: Array, entropy: Array, known: Collection[str]) -> PolicyBatch:
    return PolicyBatch(
        logprobs=logprobs,
        loss_mask=batch.loss_mask,
        segment_ids=batch.segment_ids,
        advantages=batch.advantages,
        entropy=entropy,
        positions=batch.positions,
        turn=batch.turn,
        policy_version=batch.policy_version,
        temperature=batch.temperature,
        **{name: getattr(batch, name) for name in known},
    )


def _reference_metrics(batch: PolicyBatch) -> Metrics:
    """Estimates of KL(policy || reference), whether or not the objective has a KL term."""
    means = {}
    if batch.ref_logprobs is not None:
        for kind in ("k1", "k3"):
            value = kl_penalty(batch.logprobs, batch.ref_logprobs, batch.loss_mask, kind=kind)
            means[f"kl_ref_{kind}"] = masked_mean(value, batch.loss_mask)
    return Metrics(means, {}, {}, {})


def _counts(denominators: Denominators) -> Scalars:
    return {"num_tokens": denominators.num_tokens, "num_sequences": denominators.num_sequences}


def _apply(state: TrainState, grads: Any, norm: Array, optimizer: Optimizer) -> TrainState:
    """The state after an update with clipped gradients."""
    factor = clip_factor(norm, optimizer.max_grad_norm)
    grads = jax.tree.map(lambda grad: grad * factor, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.update + 1, state.skipped, jnp.zeros_like(state.skipped_in_a_row))


def _choose(finite: Bool[Array, ""], moved: TrainState, state: TrainState) -> TrainState:
    """`moved` if all went well, else `state` as it was with the skipped update counted.

    A select per element, not a branch: it fuses with the optimizer's own pass over the parameters.
    """
    stayed = state._replace(skipped=state.skipped + 1, skipped_in_a_row=state.skipped_in_a_row + 1)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, stayed)
