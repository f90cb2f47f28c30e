"""What every engine offers: token ids in, token ids out, weights by version."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Sampling:
    """How to sample one reply.

    Args:
        max_tokens: at most this many new tokens (tokens).
        temperature: divides the logits; 0 = greedy (evaluation only).
        stop_ids: sampling ends with (and keeps) any of these ids.
        seed: the reply is a function of (weights, prompt ids, sampling, seed).
        top_p, top_k, min_p: truncations of the distribution; evaluation only. 1.0, 0 and 0.0 switch them off.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Completion:
    """One reply, exactly as sampled.

    Args:
        token_ids: sampled ids, the stop id included.
        logprobs: log-prob (nats) of each id under the distribution it was sampled from.
        finish_reason: "stop" (a stop id was sampled, also as the last allowed token) or "length".
        versions: policy version of each id.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[int, ...]


class TokenEngine(Protocol):
    """An engine that can train: it returns the ids and log-probs that it sampled."""

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, *, session: Hashable | None = None, request_id: str = ""
    ) -> Completion:
        """Samples one reply. `session` names the episode, so that its cache is kept between turns until `release`.

        Raises:
            EngineError: the request can't be answered; the message names `request_id`.
        """
        ...

    async def release(self, session: Hashable) -> None:
        """Forgets the cache of a session; unknown sessions are no error."""
        ...

    async def publish(self, params: Any, version: int) -> None:
        """Replaces the weights; later replies carry `version`, which must be above all earlier ones."""
        ...

    async def close(self) -> None:
        """Ends the engine and every request in flight."""
        ...


class EngineError(RuntimeError):
    """A request that failed for good: what, which request, what to do."""
