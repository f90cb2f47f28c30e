"""Loss of a value head (critic)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from hermes_jax.objectives.metrics import Metrics, masked_mean
from hermes_jax.objectives.segments import clean


def value_loss(
    values: Float[Array, "*rows width"],
    old_values: Float[Array, "*rows width"],
    returns: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
    *,
    clip_value: float | None = None,
) -> tuple[Float[Array, "*rows width"], Metrics]:
    """Loss per token, for `aggregate`, and its metrics (PPO arXiv:1707.06347).

    `0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)` with `c = clip_value`; None: `0.5 (v - R)^2`. The
    gradient is 0 where the clipped branch is the larger one.
    """
    value, target = clean(values, loss_mask), clean(returns, loss_mask)
    squared = (value - target) ** 2
    clipped = jnp.zeros_like(loss_mask)
    if clip_value is not None:
        old = clean(old_values, loss_mask)
        # The larger branch differs from the other only outside the band, where the clipped value is a constant.
        near = lax.stop_gradient((jnp.clip(value, old - clip_value, old + clip_value) - target) ** 2)
        clipped = near > squared
        squared = jnp.where(clipped, near, squared)
    means = {
        "value_clip_frac": masked_mean(clipped, loss_mask),
        "value_mean": masked_mean(value, loss_mask),
        "return_mean": masked_mean(target, loss_mask),
    }
    return 0.5 * squared, Metrics(means, {}, {}, {})
