"""AdamW with global-norm clipping and a schedule that counts optimizer updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

_NO_DECAY = ("norm", "bias", "embed")


@dataclass(frozen=True)
class OptimizerConfig:
    """What the optimizer does.

    Args:
        learning_rate: peak learning rate.
        schedule: after the warm-up: "constant", or "cosine" or "linear" down to `end_fraction` at `total_steps`.
        warmup_steps: linear rise to `learning_rate` (optimizer updates); the first update already moves.
        total_steps: length of the schedule, warm-up included (optimizer updates); only a falling schedule needs it.
        end_fraction: share of `learning_rate` at `total_steps` and after.
        b1, b2, eps: Adam's decay rates and the term that keeps its root from 0.
        weight_decay: decoupled decay; norms, biases and embeddings have none.
        max_grad_norm: clips the global norm of the gradient; None = no clipping.
    """

    learning_rate: float
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    end_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "cosine", "linear"):
            raise ValueError(f"schedule must be constant, cosine or linear, got {self.schedule!r}")
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"a {self.schedule} schedule needs total_steps > warmup_steps={self.warmup_steps}, "
                f"got total_steps={self.total_steps}"
            )
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be > 0, or None for no clipping; got {self.max_grad_norm}")


class Optimizer(NamedTuple):
    """An Optax transformation and the parts of it that the update step reports.

    Fields:
        init, update: as in Optax. The gradients that `update` takes are already clipped.
        learning_rate: update number (from 0) → learning rate.
        max_grad_norm: bound of the global norm, None = none.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    learning_rate: Callable[[Any], Any]
    max_grad_norm: float | None


def make_schedule(config: OptimizerConfig) -> Callable[[Any], Any]:
    """Learning rate by update number: linear warm-up, then constant, cosine or linear.

    Update k of w warm-up updates has (k + 1) / w of the peak, so that no update is without effect.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    after = _after_warmup(config)

    def schedule(count: Any) -> Any:
        rising = peak * jnp.minimum(1.0, (count + 1) / max(warmup, 1))
        return jnp.where(count < warmup, rising, after(jnp.maximum(count - warmup, 0)))

    return schedule


def _after_warmup(config: OptimizerConfig) -> Callable[[Any], Any]:
    peak = config.learning_rate
    if config.schedule == "constant":
        return optax.constant_schedule(peak)
    assert config.total_steps is not None
    steps = config.total_steps - config.warmup_steps
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps, alpha=config.end_fraction)
    return optax.linear_schedule(peak, peak * config.end_fraction, steps)


def decay_mask(params: Any) -> Any:
    """True for the leaves that decay: all but norms, biases and embeddings (by the names in their path)."""

    def decays(path: Any, _: Any) -> bool:
        names = jax.tree_util.keystr(path).lower()
        return not any(word in names for word in _NO_DECAY)

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    """AdamW (arXiv:1711.05101) as an Optax chain; moments are fp32 whatever the dtype of the gradients.

    Clipping is not in the chain: the update step needs the norm anyway and scales the gradients itself.
    """
    schedule = make_schedule(config)
    chain = optax.chain(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=jnp.float32),
        optax.add_decayed_weights(config.weight_decay, decay_mask) if config.weight_decay else optax.identity(),
        optax.scale_by_learning_rate(schedule),
    )
    return Optimizer(chain.init, chain.update, schedule, config.max_grad_norm)


def clip_factor(norm: Any, max_norm: float | None) -> Any:
    """What gradients of this global norm are multiplied by: `min(1, max_norm / norm)`."""
    if max_norm is None:
        return jnp.ones_like(norm)
    return jnp.where(norm > max_norm, max_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny), 1.0)
