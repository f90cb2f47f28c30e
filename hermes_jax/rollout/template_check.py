"""A look at a chat template before training starts: can an agent live with it, and what will it do to trajectories?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_jax.rollout.chat import ChatRenderer, Message
from hermes_jax.rollout.conventions import CALL_TEXT, TOOL, USER, probe_reply
from hermes_jax.rollout.reply_forms import answers_as_user, as_sampled, reasoning_apart
from hermes_jax.rollout.template import TemplateError
from hermes_jax.rollout.transcript import Transcript

_THOUGHT = "probe of a thought"


@dataclass(frozen=True)
class TemplateReport:
    """What a chat template does.

    Args:
        keeps_prefix: a prompt after a tool result starts with all ids so far; else every turn is a trajectory of its
            own, each with the whole conversation before it.
        keeps_thinking: that also holds where the reply begins with a thinking block.
        shows_tools: it writes the tools that it is given.
        takes_system: it accepts a system message.
        results_as_user: it knows no tool results, they are shown as the user's messages.
        end_of_turn: the added token that it writes after a reply.
        stop_ids: ids that end a reply.
        generation_prompt: what it writes before a reply.
        opens_thinking: replies begin inside a thinking block.
        bos: how many of the tokenizer's bos tokens a prompt starts with.
        uses_date: it writes the date (a fixed one here, so that a run can be repeated).
    """

    keeps_prefix: bool
    keeps_thinking: bool
    shows_tools: bool
    takes_system: bool
    results_as_user: bool
    end_of_turn: str
    stop_ids: tuple[int, ...]
    generation_prompt: str
    opens_thinking: bool
    bos: int
    uses_date: bool

    def lines(self) -> list[str]:
        """The report for people, a line for each thing worth knowing."""
        prefix = (
            "every turn extends the ids before it"
            if self.keeps_prefix and self.keeps_thinking
            else "thinking is taken out of history: the turn after one begins a new trajectory"
            if self.keeps_prefix
            else "history is rewritten: every turn is a trajectory of its own"
        )
        tools = "shows tools" if self.shows_tools else "does not show tools"
        notes = {
            "the generation prompt opens a thinking block": self.opens_thinking,
            "it knows no tool results: they are shown as the user's messages": self.results_as_user,
            "it takes no system message": not self.takes_system,
            "it writes the date: a fixed date stands in its place": self.uses_date,
            f"prompts start with {self.bos} bos tokens": self.bos > 1,
        }
        first = f"{prefix}; it {tools}; replies end with {self.end_of_turn} (stop ids {self.stop_ids})"
        return [f"chat template: {note}" for note in (first, *(note for note, holds in notes.items() if holds))]


def examine(renderer: ChatRenderer) -> TemplateReport:
    """Examines the renderer's template by rendering short conversations with a tool call.

    Raises:
        TemplateError: an agent can't use it: it leaves out the user's text, earlier calls or tool results, or marks no
            end of a reply. The message says which and what to do.
    """
    user = {"role": "user", "content": USER}
    prompt = renderer.render([user]).text
    if USER not in prompt:
        raise TemplateError("the chat template leaves out the user's text (it may want content in parts); use another")
    conventions = renderer.conventions
    if not conventions.forms:
        raise TemplateError("the chat template leaves out tool calls or their results in every form; use another")
    end = conventions.end_before_answer
    if end is None:
        raise TemplateError("the chat template writes no added token after a reply, so a reply has no end; use another")
    closed = renderer.render([user], add_generation_prompt=False).text
    bos = renderer.codec.special_tokens.get("bos_token", "")
    keeps_thinking = _keeps_prefix(renderer, _THOUGHT)
    return TemplateReport(
        keeps_prefix=keeps_thinking if conventions.opens_thinking else _keeps_prefix(renderer, ""),
        keeps_thinking=keeps_thinking,
        shows_tools=_shown("probe_tool", renderer, [user], [TOOL]),
        takes_system=_shown(
            "probe of the system", renderer, [{"role": "system", "content": "probe of the system"}, user]
        ),
        results_as_user=conventions.forms == (answers_as_user,),
        end_of_turn=end,
        stop_ids=renderer.stop_ids,
        generation_prompt=prompt[len(closed) :] if prompt.startswith(closed) else "",
        opens_thinking=conventions.opens_thinking,
        bos=_repeats(prompt, bos),
        uses_date=renderer.template.uses_date,
    )


def check_prompt(renderer: ChatRenderer, messages: Sequence[Message], context_limit: int | None = None) -> list[int]:
    """Checks the first prompt of a task: it renders, names every tool, and fits. Returns its ids.

    Raises:
        TemplateError: one of these does not hold; the message says what to do.
    """
    rendered = renderer.render(messages)
    hidden = [name for name in map(_name, renderer.tools or ()) if name not in rendered.text]
    if hidden:
        raise TemplateError(
            f"the policy can't see the tools {', '.join(hidden)}: the chat template ignores tools, and the messages "
            "don't mention them; put them into the system prompt ({tools} in env.system_prompt, or "
            "tool_system_prompt() in the environment), or use a chat template that shows tools"
        )
    ids = renderer.encode(rendered)
    if context_limit is not None and len(ids) >= context_limit:
        raise TemplateError(
            f"a prompt has {len(ids)} tokens, the context holds {context_limit} with the reply; raise "
            "model.context_length or shorten the prompt"
        )
    return ids


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", ""))


def _keeps_prefix(renderer: ChatRenderer, thought: str) -> bool:
    """Whether a tool call, written as the template itself writes it, stays as it is in the prompt after it."""
    user = {"role": "user", "content": USER}
    transcript = Transcript(renderer, [user])
    text = _reply_in_its_own_words(renderer, thought)
    ids = [*renderer.encode_reply(text, after=transcript.prompt_ids[-1]), renderer.end_id(before_answer=True)]
    transcript.add_sampled(ids, [0.0] * len(ids), [0] * len(ids), 0)
    reply = probe_reply(text)
    transcript.extend(reply.turn, reply.answers)
    return transcript.rewrites == 0


def _reply_in_its_own_words(renderer: ChatRenderer, thought: str) -> str:
    """What a model of this template samples for the probe's call: what the template writes after its own prompt."""
    user, end = {"role": "user", "content": USER}, renderer.conventions.end_before_answer or ""
    prompt = renderer.render([user]).text
    whole = f"<think>\n{thought}\n</think>\n\n{CALL_TEXT}" if thought else CALL_TEXT
    for form in (reasoning_apart, as_sampled):
        try:
            text = renderer.render([user, *(form(probe_reply(whole)) or [])], add_generation_prompt=False).text
        except TemplateError:
            continue
        own, found, _ = text[len(prompt) :].partition(end)
        if text.startswith(prompt) and found and thought in own and CALL_TEXT in own:
            return own
    return whole.removeprefix(renderer.conventions.prefill)


def _repeats(text: str, start: str) -> int:
    return 1 + _repeats(text[len(start) :], start) if start and text.startswith(start) else 0


def _shown(words: str, renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> bool:
    try:
        return words in renderer.template.render(messages, tools, add_generation_prompt=True).text
    except TemplateError:
        return False
