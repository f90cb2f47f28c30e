"""Chat templates: compiling them as `transformers` does, and telling their own text from that of the messages.

What a template writes may become special ids; what a message says may not. Texts in messages that look like a control
token are wrapped in two marks before rendering. The marks leave everything else alone (templates may split, trim and
compare contents), go away afterwards, and leave behind which characters of the rendering are protected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

FIXED_DATE = datetime(2025, 1, 1)
"""What `strftime_now` says, so that a run can be repeated on another day."""

TRUSTED_ROLES = ("system", "developer", "assistant")
"""Roles whose text may hold added tokens that aren't special, as `<tool_call>`: the prompt's author and the policy."""


class TemplateError(ValueError):
    """A chat template that can't be used, or that refuses a conversation: what, and what to do."""


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which training templates put around replies."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance variable)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = FIXED_DATE.strftime
    return environment


def select_template(chat_template: Any, has_tools: bool) -> str:
    """The template text of a tokenizer: one text, or several by name (`tool_use` where there are tools).

    Raises:
        TemplateError: there is none.
    """
    if isinstance(chat_template, Mapping):
        names = ("tool_use", "default") if has_tools else ("default",)
        chat_template = next((chat_template[name] for name in names if name in chat_template), None)
    if not isinstance(chat_template, str) or not chat_template:
        raise TemplateError(
            "the tokenizer has no chat template; put chat_template.jinja into the model folder (an instruct model of "
            "the same family has one)"
        )
    return chat_template


@dataclass(frozen=True)
class Rendered:
    """A rendering: its text, and which parts of it are the words of a message that look like a control token.

    Args:
        text: without marks.
        protected: (start, end) in characters, ascending: must not become special ids, not even in part.
    """

    text: str
    protected: tuple[tuple[int, int], ...] = ()

    def after(self, start: int) -> Rendered:
        """The part from `start` on."""
        kept = ((max(a - start, 0), b - start) for a, b in self.protected if b >= start)
        return Rendered(self.text[start:], tuple(kept))


class ChatTemplate:
    """A compiled template with its control tokens.

    Args:
        source: Jinja text.
        added: the tokenizer's added tokens: text -> special or not.
        variables: what the template sees besides messages and tools (bos_token, enable_thinking, ...).

    Raises:
        TemplateError: the text is no Jinja template; the message has the line.
    """

    def __init__(self, source: str, added: Mapping[str, bool], variables: Mapping[str, Any]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            literals = _literals(environment, source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is no valid Jinja: line {error.lineno}: {error.message}") from None
        self.variables = dict(variables)
        self.uses_date = "strftime_now" in source
        special = {text for text, is_special in added.items() if is_special}
        # Merely added tokens are control tokens where the template writes them; others are words ("\n\n", "<h1>").
        control = {text for text in added if text.strip() and (text in special or text in literals)}
        self._guards = {True: _Guard(special), False: _Guard(control)}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> Rendered:
        """Renders a conversation.

        Raises:
            TemplateError: the template refuses it; the message has the template's own words.
        """
        marks = _Marks([messages, tools])
        marked = [self._guards[m.get("role") in TRUSTED_ROLES].mark(m, marks) for m in messages]
        marked_tools = self._guards[False].mark(list(tools), marks) if tools else None
        context = {"documents": None, **self.variables}
        try:
            text = self._template.render(
                messages=marked, tools=marked_tools, add_generation_prompt=add_generation_prompt, **context
            )
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
            raise TemplateError(f"the chat template refuses the conversation: {error}") from error
        return marks.remove(text)

    def protect_reply(self, text: str) -> Rendered:
        """The text of a reply by itself, protected as in a message of the assistant."""
        marks = _Marks([text])
        return marks.remove(self._guards[True].mark(text, marks))


class _Guard:
    """Finds what must be protected in a text: whole control tokens, and at its ends pieces of one."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._heads = {t[i:] for t in longest_first for i in range(1, len(t))}
        self._tails = {t[:i] for t in longest_first for i in range(1, len(t))}
        self._longest = len(longest_first[0]) if longest_first else 0

    def mark(self, value: Any, marks: _Marks) -> Any:
        """The value with every protected text in it marked; keys, roles and types stay."""
        if isinstance(value, str):
            return self._mark_text(value, marks)
        if isinstance(value, Mapping):
            return {k: v if k in ("role", "type") else self.mark(v, marks) for k, v in value.items() if v is not None}
        if isinstance(value, list | tuple):
            return [self.mark(v, marks) for v in value]
        return value

    def _mark_text(self, text: str, marks: _Marks) -> str:
        spans = [m.span() for m in self._whole.finditer(text)]
        lengths = range(min(self._longest, len(text)), 0, -1)
        head = next((n for n in lengths if text[:n] in self._heads), 0)
        tail = next((n for n in lengths if text[len(text) - n :] in self._tails), 0)
        merged = _merge([(0, head), *spans, (len(text) - tail, len(text))])
        out, at = [], 0
        for start, end in merged:
            out += [text[at:start], marks.around(text[start:end])]
            at = end
        return "".join((*out, text[at:]))


class _Marks:
    """The marks of one rendering: an opening one for each different text, so that no other text can take its place."""

    def __init__(self, values: Any) -> None:
        used = set(json.dumps(values, ensure_ascii=False, default=str))
        codes = chain(range(0xFDD0, 0xFDEF), range(0xF0000, 0xFFFFE))  # noncharacters, then private use
        self._free = (chr(code) for code in codes if chr(code) not in used)
        self._closing = next(self._free)
        self._openings: dict[str, str] = {}

    def around(self, text: str) -> str:
        """The text between its marks."""
        if text not in self._openings:
            self._openings[text] = next(self._free)
        return f"{self._openings[text]}{text}{self._closing}"

    def remove(self, text: str) -> Rendered:
        """Takes the marks out of a rendering. A mark that lost its partner (a template split the text) still keeps
        apart what stands on its two sides."""
        if not self._openings:
            return Rendered(text)
        pairs = [
            f"{_escaped(mark)}{re.escape(inside)}{_escaped(self._closing)}" for inside, mark in self._openings.items()
        ]
        single = "|".join(map(_escaped, (self._closing, *self._openings.values())))
        mark = re.compile(single)
        pieces: list[str] = []
        protected: list[tuple[int, int]] = []
        length = at = 0
        for found in re.finditer("|".join((*pairs, single)), text):
            inside = mark.sub("", found[0])
            pieces += [text[at : found.start()], inside]
            length += found.start() - at
            protected.append((length, length + len(inside)))
            length, at = length + len(inside), found.end()
        return Rendered("".join((*pieces, text[at:])), tuple(protected))


def _escaped(mark: str) -> str:
    """A pattern for a mark, also as JSON without non-ASCII characters writes it."""
    return f"(?:{mark}|{re.escape(json.dumps(mark)[1:-1])})"


def _merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins overlapping spans; empty ones go."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _literals(environment: jinja2.Environment, source: str) -> str:
    """All text that stands in a template itself, apart from its code."""
    tree = environment.parse(source)
    parts = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
    parts += [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
    return "\0".join(parts)
