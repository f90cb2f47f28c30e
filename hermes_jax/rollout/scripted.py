"""Scripted conversations as episodes, for a warm start by the same learner."""

from __future__ import annotations

from collections.abc import Sequence

from hermes_jax.data.trajectory import Episode, Outcome
from hermes_jax.rollout.chat import ChatRenderer, Message
from hermes_jax.rollout.parsers.base import ParsedTurn
from hermes_jax.rollout.transcript import Transcript


def demonstration_episode(
    renderer: ChatRenderer, messages: Sequence[Message], *, task_id: str = "demonstration", version: int = 0
) -> Episode:
    """An episode in which every reply was sampled from the script with probability 1.

    The replies (content of the assistant's messages, tool calls written out in it) and the end marker after each have
    mask True and log-prob 0; prompts come about as they do for the engine.

    Args:
        messages: a conversation that ends with a reply; messages before the first reply are the prompt.

    Raises:
        ValueError: it holds no reply or doesn't end with one.
    """
    if not messages or messages[-1].get("role") != "assistant":
        raise ValueError("a scripted conversation ends with a message of the assistant")
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    transcript = Transcript(renderer, messages[: turns[0]])
    for turn, (start, end) in enumerate(zip(turns, [*turns[1:], len(messages)], strict=True)):
        ids = renderer.encode_reply(str(messages[start]["content"]), after=transcript.prompt_ids[-1])
        ids.append(renderer.end_id(before_answer=end < len(messages)))
        transcript.add_sampled(ids, [0.0] * len(ids), [version] * len(ids), turn)
        if end < len(messages):
            transcript.extend(ParsedTurn(str(messages[start]["content"])), messages[start + 1 : end])
    return Episode(
        task_id=task_id,
        member=0,
        trajectories=transcript.trajectories(temperature=1.0),
        outcome=Outcome.COMPLETED,
        messages=tuple(dict(m) for m in messages),
        counters={"turns": len(turns)},
    )
