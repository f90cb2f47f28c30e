"""What rendered probes tell of a chat template: how replies begin and end, and which forms of them it shows whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_jax.rollout.parsers.base import ParsedTurn, ToolCall
from hermes_jax.rollout.reply_forms import FORMS, Messages, Reply
from hermes_jax.rollout.template import ChatTemplate, TemplateError

USER, RESULT, ARGUMENT = "probe of the user", "probe of a result", "probe of an argument"
CALL_TEXT = f'<tool_call>\n{{"name": "probe_tool", "arguments": {{"x": "{ARGUMENT}"}}}}\n</tool_call>'
CALL = ToolCall("probe_tool", {"x": ARGUMENT}, "call00000")
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "probe"}}},
    },
}
_WORD = "hermesprobe"


@dataclass(frozen=True)
class Conventions:
    """How a chat template treats replies.

    Args:
        prefill: what the generation prompt writes beyond the start of every reply, such as `<think>`.
        opens_thinking: replies begin inside a thinking block.
        end_before_answer: added token after a reply that a tool result follows; None = none.
        end_before_user: the same where a message of the user follows, or nothing.
        forms: the forms of a reply with answers that it shows whole, best first.
    """

    prefill: str
    opens_thinking: bool
    end_before_answer: str | None
    end_before_user: str | None
    forms: tuple[Callable[[Reply], Messages | None], ...]


def find_conventions(template: ChatTemplate, added: Sequence[str]) -> Conventions:
    """Learns the conventions of a template; what it refuses to render, it has no convention for."""
    user = {"role": "user", "content": USER}
    forms = tuple(form for form in FORMS if _shows(template, [user], form))
    prompt = _text(template, [user], generation_prompt=True)
    header, found, _ = _text(template, [user, {"role": "assistant", "content": _WORD}]).partition(_WORD)
    endings = [_ending(template, [user, *after], added) for after in _CONTINUATIONS]
    before_user = endings[1] or endings[2]
    prefill = prompt[len(header) :] if found and prompt.startswith(header) else ""
    opens_thinking = prompt.rstrip().endswith("<think>")
    return Conventions(
        prefill=prompt[prompt.rindex("<think>") :] if opens_thinking else prefill,
        opens_thinking=opens_thinking,
        end_before_answer=endings[0] or before_user,
        end_before_user=before_user,
        forms=forms,
    )


def probe_reply(text: str, prefill: str = "") -> Reply:
    """A reply that says `text`, makes one call, and gets one result."""
    result = {"role": "tool", "name": "probe_tool", "tool_call_id": CALL.id, "content": RESULT}
    return Reply(text, ParsedTurn("", (CALL,)), [result], prefill)


_SAID: dict[str, Any] = {"role": "assistant", "content": _WORD}
_CONTINUATIONS: tuple[list[dict[str, Any]], ...] = (
    [_SAID, {"role": "tool", "name": "probe_tool", "tool_call_id": CALL.id, "content": RESULT}],
    [_SAID],
    [_SAID, {"role": "user", "content": USER}],
)


def _shows(template: ChatTemplate, before: Messages, form: Callable[[Reply], Messages | None]) -> bool:
    """Whether the template writes both the call and its result when it gets them in this form."""
    messages = form(probe_reply(f"<think>\nprobe\n</think>\n\n{CALL_TEXT}", prefill="\n"))
    text = _text(template, [*before, *messages], generation_prompt=True) if messages else ""
    return ARGUMENT in text and RESULT in text


def _ending(template: ChatTemplate, messages: Messages, added: Sequence[str]) -> str | None:
    """The added token right after the reply, white space aside."""
    _, found, rest = _text(template, messages).rpartition(_WORD)
    token = re.match("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)", rest.lstrip())
    return token[0] if found and token else None


def _text(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = False) -> str:
    """The rendering, "" where the template refuses."""
    try:
        return template.render(messages, None, add_generation_prompt=generation_prompt).text
    except TemplateError:
        return ""
