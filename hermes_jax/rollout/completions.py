"""What an engine returned, checked before any of it can reach training."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from hermes_jax.engines.base import Completion, EngineError

FINISH_REASONS = ("stop", "length", "abort")
"""`abort` = the engine gave up the request part-way; its tokens are good, and more can be sampled after them."""


def check_completion(
    completion: Completion, *, request_id: str, max_tokens: int, vocab_size: int, forbidden: Collection[int]
) -> None:
    """Raises EngineError, naming the request, unless the reply can be trusted token by token.

    Args:
        max_tokens: what was asked for.
        vocab_size: ids are below it.
        forbidden: ids that must not be sampled (placeholders of images, ids without text).
    """
    ids, logprobs = completion.token_ids, completion.logprobs
    problem = None
    if not len(ids) == len(logprobs) == len(completion.versions):
        problem = f"{len(ids)} token ids, {len(logprobs)} log-probs and {len(completion.versions)} versions"
    elif completion.finish_reason not in FINISH_REASONS:
        problem = f"finish reason {completion.finish_reason!r}, known are {', '.join(FINISH_REASONS)}"
    elif len(ids) > max_tokens:
        problem = f"{len(ids)} tokens although {max_tokens} were asked for"
    else:
        problem = next(
            (
                _problem(place, token, logprob, vocab_size, forbidden)
                for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
                if not 0 <= token < vocab_size or token in forbidden or not _is_logprob(logprob)
            ),
            None,
        )
    if problem:
        raise EngineError(f"request {request_id}: the engine returned {problem}; the reply is not used")


def without_padding(completion: Completion, stop_ids: Collection[int], pad_id: int | None) -> Completion:
    """The reply without the padding that some engines return after the end marker."""
    ids = completion.token_ids
    end = len(ids)
    while end and ids[end - 1] == pad_id:
        end -= 1
    if pad_id in stop_ids and end < len(ids) and not (end and ids[end - 1] in stop_ids):
        end += 1  # the padding token doubles as end marker: the first of them was sampled
    if end == len(ids) or not end or ids[end - 1] not in stop_ids:
        return completion
    return replace(
        completion, token_ids=ids[:end], logprobs=completion.logprobs[:end], versions=completion.versions[:end]
    )


def _is_logprob(value: float) -> bool:
    return math.isfinite(value) and value <= 1e-4


def _problem(place: int, token: int, logprob: float, vocab_size: int, forbidden: Collection[int]) -> str:
    if not 0 <= token < vocab_size:
        return f"token id {token} at position {place}, outside the vocabulary of {vocab_size} ids"
    if token in forbidden:
        return f"token id {token} at position {place}, which must not be sampled (pass it to the engine as banned)"
    return f"log-prob {logprob} for token id {token} at position {place}"
