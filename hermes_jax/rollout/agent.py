"""What plays episodes: the policy behind an engine, its tools, and the limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hermes_jax.clock import Clock, RealClock
from hermes_jax.engines.base import TokenEngine
from hermes_jax.rollout.chat import ChatRenderer
from hermes_jax.rollout.parsers.base import Parser
from hermes_jax.rollout.tool_calls import CallableTool


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode ends at the latest.

    Args:
        max_turns: model turns; calls of the last one still run.
        max_new_tokens: sampled tokens per turn.
        max_total_new_tokens: sampled tokens per episode.
        context_limit: tokens of prompt and reply together.
        episode_timeout_s: one deadline for everything: preparing the sandbox, waiting for the engine, tools.
        tool_timeout_s: deadline of one tool call; the episode goes on after it.
        tool_output_limit_bytes: so much of a tool result (in UTF-8) is shown to the model.
        resume_partial: a reply that the engine broke off is sampled on after the tokens that there are.
        end_on_tool_timeout: a tool call past its deadline ends the episode.
    """

    max_turns: int = 30
    max_new_tokens: int | None = None
    max_total_new_tokens: int | None = None
    context_limit: int = 4096
    episode_timeout_s: float = math.inf
    tool_timeout_s: float = math.inf
    tool_output_limit_bytes: int | None = 8192
    resume_partial: bool = False
    end_on_tool_timeout: bool = False


@dataclass(frozen=True)
class Agent:
    """What plays an episode, the same for all episodes of a collection.

    Args:
        engine: samples the turns.
        renderer: makes prompts of conversations.
        parser: finds tool calls in a turn.
        tools: by name.
        limits: where an episode ends.
        temperature: of sampling; 0 = greedy, which can't train, so such episodes have no trajectories.
        top_p, top_k, min_p: truncations, for evaluation; with one of them episodes have no trajectories either.
        forbidden_ids: ids that no reply may hold, besides placeholders of images and the like.
        vocab_size: ids are below it; None = the tokenizer's.
        clock: measures timings and deadlines.
    """

    engine: TokenEngine
    renderer: ChatRenderer
    parser: Parser
    tools: Mapping[str, CallableTool] = field(default_factory=dict)
    limits: EpisodeLimits = EpisodeLimits()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    forbidden_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None
    clock: Clock = field(default_factory=RealClock)

    @property
    def trains(self) -> bool:
        """Whether log-probs of its sampling are those of the policy."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0 and self.min_p == 0
