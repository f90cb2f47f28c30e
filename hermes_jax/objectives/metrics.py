"""Metrics of an update as sums that add up over micro-batches, and one function that finishes them.

Per micro-batch a loss returns `Metrics`; `lax.scan` may stack them, `merge_metrics` may add them; `finish_metrics`
takes either.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hermes_jax.objectives.segments import clean, safe_divide


class Mean(NamedTuple):
    """A mean in the making: `total / weight`, where `weight` is a number of tokens."""

    total: Float[Array, "*micro"]
    weight: Float[Array, "*micro"]


class Metrics(NamedTuple):
    """Named metrics by the way they are combined over micro-batches."""

    means: dict[str, Mean]
    sums: dict[str, Float[Array, "*micro"]]
    minima: dict[str, Float[Array, "*micro"]]
    maxima: dict[str, Float[Array, "*micro"]]

    def __or__(self, other: Metrics) -> Metrics:
        """Both sets of names."""
        return Metrics(
            self.means | other.means,
            self.sums | other.sums,
            self.minima | other.minima,
            self.maxima | other.maxima,
        )


def no_metrics() -> Metrics:
    """The empty set."""
    return Metrics({}, {}, {}, {})


def masked_mean(values: Float[Array, "*rows width"], mask: Bool[Array, "*rows width"]) -> Mean:
    """Mean of `values` (flags count as 0 and 1) over `mask`."""
    return Mean(jnp.sum(clean(values, mask)), jnp.sum(mask, dtype=jnp.float32))


def masked_min(values: Float[Array, "*rows width"], mask: Bool[Array, "*rows width"]) -> Float[Array, ""]:
    """Minimum over `mask`; infinity, which changes no minimum, when nothing is there."""
    return jnp.min(jnp.where(mask, values, jnp.inf), initial=jnp.inf)


def masked_max(values: Float[Array, "*rows width"], mask: Bool[Array, "*rows width"]) -> Float[Array, ""]:
    """Maximum over `mask`; minus infinity when nothing is there."""
    return jnp.max(jnp.where(mask, values, -jnp.inf), initial=-jnp.inf)


def merge_metrics(first: Metrics, second: Metrics) -> Metrics:
    """The metrics of two micro-batches together; both hold the same names."""
    means = {
        name: Mean(mean.total + second.means[name].total, mean.weight + second.means[name].weight)
        for name, mean in first.means.items()
    }
    return Metrics(
        means,
        {name: value + second.sums[name] for name, value in first.sums.items()},
        {name: jnp.minimum(value, second.minima[name]) for name, value in first.minima.items()},
        {name: jnp.maximum(value, second.maxima[name]) for name, value in first.maxima.items()},
    )


def finish_metrics(metrics: Metrics) -> dict[str, Float[Array, ""]]:
    """One number per name; leading axes (micro-batches stacked by a scan) are reduced. Of nothing generated: 0."""
    finished = {name: safe_divide(jnp.sum(m.total), jnp.sum(m.weight)) for name, m in metrics.means.items()}
    finished |= {name: jnp.sum(value) for name, value in metrics.sums.items()}
    finished |= {name: _or_zero(jnp.min(value), jnp.inf) for name, value in metrics.minima.items()}
    return finished | {name: _or_zero(jnp.max(value), -jnp.inf) for name, value in metrics.maxima.items()}


def _or_zero(value: Float[Array, ""], neutral: float) -> Float[Array, ""]:
    return jnp.where(value == neutral, 0.0, value)
