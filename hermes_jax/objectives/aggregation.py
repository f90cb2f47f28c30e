"""From a loss per token to one number: a sum and the denominator of the whole optimizer update.

| mode | value | source |
|---|---|---|
| `token_mean` | sum of the loss over all tokens / number of tokens | DAPO, arXiv:2503.14476 |
| `sequence_mean` | mean over sequences of the sequence's token mean | GRPO, arXiv:2402.03300 |
| `sequence_sum` | mean over sequences of the sequence's token sum | LUSPO, arXiv:2602.05261 |
| `constant` | sum over all tokens / (sequences x `max_tokens`) | Dr. GRPO, arXiv:2503.20783 |

"Token" is a token of the loss mask. A sequence without such tokens is left out of the count of the sequence modes;
`constant` counts it, for its denominator must not depend on the data. Nothing generated at all gives exactly 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hermes_jax.objectives.segments import clean, generated_counts, safe_divide, segment_ends

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")


class Denominators(NamedTuple):
    """Counts over the whole optimizer update: every micro-batch and every shard divides by these same numbers."""

    num_tokens: Float[Array, ""]
    num_sequences: Float[Array, ""]


def count_denominators(
    loss_mask: Bool[Array, "*rows width"], segment_ids: Int[Array, "*rows width"], mode: str
) -> Denominators:
    """Counts of a batch, which may have leading axes (`[micro, rows, width]` counts the whole update).

    `num_sequences` counts segments with a loss token, for `constant` every segment. Segments of a packed batch that
    were dropped before packing are unknown here: give `Denominators` yourself to have them counted.
    """
    segments = segment_ends(segment_ids) & (segment_ids > 0)
    if mode != "constant":
        segments &= generated_counts(loss_mask, segment_ids) > 0
    return Denominators(_count(loss_mask), _count(segments))


def aggregate(
    per_token: Float[Array, "*rows width"],
    loss_mask: Bool[Array, "*rows width"],
    segment_ids: Int[Array, "*rows width"],
    *,
    mode: str,
    max_tokens: int | None = None,
    denominators: Denominators | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`(sum, denominator)` of a loss per token; the aggregated loss is `safe_divide(sum, denominator)`.

    Sums of micro-batches add up exactly when all are divided by the denominator of the whole update.

    Args:
        per_token: any value, NaN and infinity included, outside the mask.
        mode: one of `AGGREGATIONS`.
        max_tokens: generated tokens that a sequence may have; for `constant` only.
        denominators: those of the whole update; None counts this batch.

    Raises:
        ValueError: unknown mode, or `constant` without `max_tokens`.
    """
    check_mode(mode, max_tokens)
    counts = denominators or count_denominators(loss_mask, segment_ids, mode)
    values = clean(per_token, loss_mask)
    if mode == "sequence_mean":
        values = safe_divide(values, generated_counts(loss_mask, segment_ids))
    return jnp.sum(values), _denominator(counts, mode, max_tokens)


def check_mode(mode: str, max_tokens: int | None) -> None:
    """Raises ValueError for an unknown mode or a missing `max_tokens`."""
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; choose one of {', '.join(AGGREGATIONS)}")
    if mode == "constant" and (max_tokens is None or max_tokens < 1):
        raise ValueError(
            f"aggregation 'constant' divides by sequences x max_tokens and needs max_tokens >= 1, got {max_tokens}; "
            "set it to the longest answer that a sequence may have"
        )


def _denominator(counts: Denominators, mode: str, max_tokens: int | None) -> Float[Array, ""]:
    if mode == "token_mean":
        return jnp.asarray(counts.num_tokens, jnp.float32)
    sequences = jnp.asarray(counts.num_sequences, jnp.float32)
    return sequences * max_tokens if mode == "constant" and max_tokens else sequences


def _count(mask: Bool[Array, "*rows width"]) -> Float[Array, ""]:
    return jnp.sum(mask, dtype=jnp.float32)
