"""How a reply and the answers to its tool calls are given to a chat template.

The reply's text as it was sampled is best: most templates write it out unchanged, which keeps the ids so far. Some want
the calls taken apart and leave tool results out without them; some know no tool results at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_jax.rollout.parsers.base import ParsedTurn, ToolCall

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Reply:
    """A model turn with its answers.

    Args:
        text: as sampled, without its end marker.
        turn: the text taken apart.
        answers: messages that follow it, tool results above all.
        prefill: what the generation prompt wrote into the reply before the sampled text.
    """

    text: str
    turn: ParsedTurn
    answers: Messages
    prefill: str = ""


def prefilled(reply: Reply) -> Messages | None:
    """The text with what the generation prompt had written before it, such as `<think>`."""
    return [_raw(reply.prefill + reply.text), *reply.answers] if reply.prefill else None


def as_sampled(reply: Reply) -> Messages | None:
    """The text alone."""
    return [_raw(reply.text), *reply.answers]


def reasoning_apart(reply: Reply) -> Messages | None:
    """The text in two: what was thought, and the rest with its calls in it."""
    thought, end, rest = reply.text.rpartition("</think>")
    if not end:
        return None
    return [_raw(rest.lstrip("\n")) | _reasoning(thought.rpartition("<think>")[2].strip("\n")), *reply.answers]


def with_calls(reply: Reply) -> Messages | None:
    """Text and calls apart."""
    return _apart(reply, as_text=False)


def with_calls_as_text(reply: Reply) -> Messages | None:
    """Text and calls apart, the arguments as JSON text."""
    return _apart(reply, as_text=True)


def answers_as_user(reply: Reply) -> Messages | None:
    """The text alone, answered by the user in one message."""
    content = "\n".join(str(message.get("content", "")) for message in reply.answers)
    return [_raw(reply.text), *([{"role": "user", "content": content}] if reply.answers else [])]


FORMS: tuple[Callable[[Reply], Messages | None], ...] = (
    prefilled,
    as_sampled,
    reasoning_apart,
    with_calls,
    with_calls_as_text,
    answers_as_user,
)
"""Best first. Each gives None where it does not apply."""


def openai_calls(calls: Sequence[ToolCall], *, as_text: bool = True) -> list[dict[str, Any]]:
    """Calls in OpenAI form, the arguments as JSON text; some templates want them as an object."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False) if as_text else dict(call.arguments),
            },
        }
        for call in calls
    ]


def _raw(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "thinking": text}


def _apart(reply: Reply, *, as_text: bool) -> Messages | None:
    turn = reply.turn
    if not turn.calls:
        return None
    message = _raw(turn.content)
    if turn.reasoning:
        message |= _reasoning(turn.reasoning)
    return [message | {"tool_calls": openai_calls(turn.calls, as_text=as_text)}, *reply.answers]
