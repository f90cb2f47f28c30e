"""What a request to the embedded engine must satisfy."""

from __future__ import annotations

from math import isfinite

import numpy as np
from jaxtyping import Int

from hermes_jax.engines.base import EngineError, Sampling


def check_prompt(prompt_ids: tuple[int, ...], *, request_id: str, width: int, vocab: int) -> Int[np.ndarray, " token"]:
    """The prompt as an array.

    Raises:
        EngineError: empty, too long to leave room for one token, or ids outside of the vocabulary.
    """
    name = _name(request_id)
    prompt = np.asarray(prompt_ids, np.int64)
    if prompt.ndim != 1 or not prompt.size:
        raise EngineError(f"{name}: the prompt is empty; it needs at least one id to continue from")
    if prompt.size + 1 > width:
        raise EngineError(
            f"{name}: a prompt of {prompt.size} tokens leaves no room for a reply in a context of {width}; "
            "shorten it or build the engine with a larger width"
        )
    outside = np.flatnonzero((prompt < 0) | (prompt >= vocab))
    if outside.size:
        raise EngineError(
            f"{name}: prompt id {prompt[outside[0]]} at position {outside[0]} lies outside of the vocabulary "
            f"[0, {vocab}); does the tokenizer belong to the model?"
        )
    return prompt.astype(np.int32)


def check_sampling(sampling: Sampling, *, request_id: str, stop_ids: int, allow_truncation: bool) -> None:
    """Checks the controls of a request.

    Raises:
        EngineError: a value without meaning, or a truncated distribution while training.
    """
    name = _name(request_id)
    if sampling.max_tokens < 1:
        raise EngineError(f"{name}: max_tokens={sampling.max_tokens}, but a reply has at least one token")
    if not (isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise EngineError(f"{name}: temperature={sampling.temperature} must be finite and >= 0 (0 = greedy)")
    if len(sampling.stop_ids) > stop_ids:
        raise EngineError(
            f"{name}: {len(sampling.stop_ids)} stop ids, but the engine was built for at most {stop_ids} (`stop_ids`)"
        )
    if not (0 < sampling.top_p <= 1 and sampling.top_k >= 0 and 0 <= sampling.min_p <= 1):
        raise EngineError(
            f"{name}: top_p={sampling.top_p} must lie in (0, 1], top_k={sampling.top_k} be >= 0, "
            f"min_p={sampling.min_p} lie in [0, 1]"
        )
    if truncates(sampling) and not allow_truncation:
        raise EngineError(
            f"{name}: top_p, top_k and min_p are for evaluation only: they change the distribution that tokens are "
            "sampled from, and the learner's log-probs, which know nothing of them, would not be those of the "
            "behaviour policy; remove them for training, or set `allow_truncation` on the engine for evaluation"
        )


def truncates(sampling: Sampling) -> bool:
    """True if the distribution is cut by top-p, top-k or min-p (greedy ignores them: its maximum always stays)."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)


def _name(request_id: str) -> str:
    return f"request {request_id!r}" if request_id else "request without an id"
