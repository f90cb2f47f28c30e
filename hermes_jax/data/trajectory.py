"""What flows through the trainer: trajectories of tokens, the episodes that hold them, and the groups of one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int


class Outcome(StrEnum):
    """How an episode ended, from facts: finish reason, tool result, clock."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    TIMEOUT = "timeout"
    TOOL_TIMEOUT = "tool_timeout"
    ENV_ERROR = "env_error"
    VERIFIER_ERROR = "verifier_error"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One token sequence exactly as the engine saw it.

    All arrays have one entry per token. `mask` says that the policy sampled the token; it is provenance and never
    derived from token values. Where it is False, `logprobs` is 0, `turn` and `policy_version` are -1 and
    `temperature` is 1.

    Args:
        tokens: token ids.
        mask: True where the policy sampled the token; False at position 0.
        logprobs: log-prob (nats) of each sampled token under the behaviour policy at its sampling temperature.
        temperature: sampling temperature of each sampled token.
        policy_version: version of the weights that sampled each token.
        turn: number of the model's turn, from 0.

    Raises:
        ValueError: an invariant does not hold; the message names it and the first offending position.
    """

    tokens: Int[np.ndarray, " token"]
    mask: Bool[np.ndarray, " token"]
    logprobs: Float[np.ndarray, " token"]
    temperature: Float[np.ndarray, " token"]
    policy_version: Int[np.ndarray, " token"]
    turn: Int[np.ndarray, " token"]

    def __post_init__(self) -> None:
        dtypes = {
            "tokens": np.int32,
            "mask": np.bool_,
            "logprobs": np.float32,
            "temperature": np.float32,
            "policy_version": np.int32,
            "turn": np.int32,
        }
        for name, dtype in dtypes.items():
            array: np.ndarray = np.array(getattr(self, name), dtype=dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        lengths = {name: getattr(self, name).shape for name in dtypes}
        if len(set(lengths.values())) != 1 or self.tokens.ndim != 1 or not self.tokens.size:
            raise ValueError(f"a trajectory needs one value per token in every array and at least one token: {lengths}")
        if self.mask[0]:
            raise ValueError("the first token of a trajectory cannot be sampled: mask[0] is True")
        _require(self.tokens >= 0, "token ids are >= 0")
        _require(np.isfinite(self.logprobs), "log-probs are finite")
        _require(self.logprobs <= 1e-4, "log-probs are <= 0")
        _require(self.mask | (self.logprobs == 0), "log-prob is 0 where mask is False")
        _require(self.mask == (self.turn >= 0), "turn is >= 0 exactly where mask is True")
        _require(self.temperature > 0, "temperature is > 0 (sampled greedily? that can't train)")

    def __len__(self) -> int:
        return int(self.tokens.size)

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.mask.sum())

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the sampled tokens; -1 if there are none."""
        return int(self.policy_version[self.mask].min()) if self.mask.any() else -1


def _require(holds: np.ndarray, what: str) -> None:
    if not holds.all():
        raise ValueError(f"invariant of a trajectory broken at token {int(np.argmin(holds))}: {what}")


@dataclass(frozen=True, eq=False)
class Episode:
    """One attempt at a task: its trajectories, what it was worth, and how it ended.

    Args:
        task_id: names the task; the members of a group share it.
        member: place in the group, from 0.
        trajectories: each exactly what the engine saw; more than one where the chat template rewrites history.
        outcome: how it ended.
        reward: None = missing (the verifier has no opinion or failed); never a stand-in 0.
        reward_parts: named parts of the reward, None where missing.
        turn_rewards: reward per model turn, empty if the environment gives none.
        success: solved or not, None = unknown.
        messages: the conversation for people, in OpenAI form.
        timings: seconds by phase (model, tools, sandbox, reward).
        counters: what happened how often (tool_calls, tool_errors, malformed_calls, ...).
        error: what went wrong, for outcomes that are errors.
    """

    task_id: str
    member: int
    trajectories: tuple[Trajectory, ...]
    outcome: Outcome
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    success: bool | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy sampled in the whole episode."""
        return sum(t.n_sampled for t in self.trajectories)


@dataclass(frozen=True, eq=False)
class Group:
    """The episodes that answer one task."""

    task_id: str
    episodes: tuple[Episode, ...]
    item: Mapping[str, Any] = field(default_factory=dict)
