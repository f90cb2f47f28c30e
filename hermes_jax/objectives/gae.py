"""Advantages from a critic: generalised advantage estimation over generated tokens, and whitening."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hermes_jax.objectives.segments import clean, generated_counts, safe_divide, segment_running, segment_starts


def gae(
    token_rewards: Float[Array, "rows width"],
    values: Float[Array, "rows width"],
    bootstrap_values: Float[Array, "rows width"],
    loss_mask: Bool[Array, "rows width"],
    segment_ids: Int[Array, "rows width"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"]]:
    """`(advantages, returns)` by GAE (arXiv:1506.02438); both 0 outside the mask.

    The successor of a generated token is the next generated token of its segment, whatever tool output lies between:
    `delta_k = r_k + gamma V_{k+1} - V_k`, `A_k = delta_k + gamma lam A_{k+1}`, `return = A + V`.

    Args:
        token_rewards: reward at each generated token; ignored elsewhere.
        values: value of the state before the token is emitted.
        bootstrap_values: value after a segment's last token, on each of its tokens: 0 for an episode that ended, the
            critic's value of the last state for one that was cut off.
    """
    rewards, values = clean(token_rewards, loss_mask), clean(values, loss_mask)
    starts_after = jnp.roll(segment_starts(segment_ids), -1, axis=-1).at[:, -1].set(True)

    def step(after: tuple[Array, Array], column: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        reward, value, bootstrap, generated, last = column
        next_value = jnp.where(last, bootstrap, after[0])
        next_advantage = jnp.where(last, 0.0, after[1])
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        here = jnp.where(generated, value, next_value), jnp.where(generated, advantage, next_advantage)
        return here, jnp.where(generated, advantage, 0.0)

    columns = (rewards, values, jnp.asarray(bootstrap_values, values.dtype), loss_mask, starts_after)
    nothing = jnp.zeros_like(values[:, 0])
    _, advantages = lax.scan(step, (nothing, nothing), tuple(x.T for x in columns), reverse=True)
    return advantages.T, clean(advantages.T + values, loss_mask)


def place_outcome_reward(
    rewards: Float[Array, "*rows width"], loss_mask: Bool[Array, "*rows width"], segment_ids: Int[Array, "*rows width"]
) -> Float[Array, "*rows width"]:
    """Each sequence's reward (given on its tokens) on its last generated token, also when tool output follows."""
    generated = loss_mask.astype(jnp.float32)
    last = loss_mask & (segment_running(generated, segment_ids) == generated_counts(loss_mask, segment_ids))
    return clean(rewards, last)


def whiten(
    values: Float[Array, "*rows width"], loss_mask: Bool[Array, "*rows width"], *, eps: float = 1e-8, ddof: int = 1
) -> Float[Array, "*rows width"]:
    """`(x - mean) / sqrt(var + eps)` over the generated tokens of the batch; 0 elsewhere and for fewer than two."""
    count = jnp.sum(loss_mask, dtype=jnp.float32)
    mean = safe_divide(jnp.sum(clean(values, loss_mask)), count)
    centred = clean(values - mean, loss_mask)
    variance = jnp.sum(centred**2) / jnp.maximum(count - ddof, 1)
    return jnp.where(count < 2, 0.0, centred / jnp.sqrt(variance + eps))
