"""The Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, between text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_jax.rollout.parsers import strict_json
from hermes_jax.rollout.parsers.base import MalformedCall, ParsedTurn, ToolCall

_SPACE = re.compile(r"[ \t\r\n]*")
_EXCERPT = 80


class HermesParser:
    """Reads calls between `<tag>` and `</tag>`; models of the family differ in the tag only.

    A block is a call when a JSON object follows the opening tag, and the closing tag, another opening tag or the end
    follows the object. It is malformed when it holds something else, and text when it only mentions the tag: no object
    and no closing tag of its own. Nothing inside `<think>` is a call; think tags inside arguments are text.
    """

    def __init__(self, tag: str = "tool_call") -> None:
        self._tags = (f"<{tag}>", f"</{tag}>")
        self._marker = re.compile("|".join(("<think>", "</think>", *map(re.escape, self._tags))))
        self.syntax = f'{self._tags[0]}{{"name": "<tool>", "arguments": {{...}}}}{self._tags[1]}'

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, thinking_open: bool = False
    ) -> ParsedTurn:
        """Takes one whole model turn apart; see `Parser.parse`."""
        return _Scan(text, self._marker, *self._tags).run(thinking_open)


class _Scan:
    """One pass over one text, from marker to marker.

    Linear: a look ahead for a JSON object fails at the first tag that stands outside a string. Where it runs on over
    tags inside strings and fails later, the look ahead from each of those tags fails at the next one.
    """

    def __init__(self, text: str, marker: re.Pattern[str], opening: str, closing: str) -> None:
        self.text, self.opening, self.closing = text, opening, closing
        self.markers = [(m.start(), m[0]) for m in marker.finditer(text)]
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.entries: list[ToolCall | MalformedCall] = []

    def run(self, thinking_open: bool) -> ParsedTurn:
        think_ends, block_ends = self._next("</think>"), self._next(self.opening, self.closing)
        at = self._skip_thinking(0, think_ends[0]) if thinking_open else 0
        thinking_before = 0
        for number, (start, kind) in enumerate(self.markers):
            if start < at:
                continue
            self.content.append(self.text[at:start])
            at = start + len(kind)
            if kind == self.opening:
                at = self._block(start, block_ends[number + 1])
            elif kind == "<think>":
                at = self._skip_thinking(at, think_ends[number + 1])
            elif kind == "</think>":  # alone: all before it was thinking that began in the prompt
                thinking_before = start
                self.content, self.entries, self.reasoning = [], [], []
            else:
                self.content.append(kind)
        self.content.append(self.text[at:])
        reasoning = "\n".join([self.text[:thinking_before], *self.reasoning]).strip()
        return ParsedTurn("".join(self.content).strip(), tuple(self.entries), reasoning)

    def _next(self, *kinds: str) -> list[int | None]:
        """For each marker number (and one more), the number of the first marker of these kinds from there on."""
        found: list[int | None] = [None] * (len(self.markers) + 1)
        for number in range(len(self.markers) - 1, -1, -1):
            found[number] = number if self.markers[number][1] in kinds else found[number + 1]
        return found

    def _skip_thinking(self, at: int, end: int | None) -> int:
        """Thinking from `at` to marker `end`, or to the very end where it is never closed: returns what follows."""
        stop = len(self.text) if end is None else self.markers[end][0]
        self.reasoning.append(self.text[at:stop])
        return min(stop + len("</think>"), len(self.text))

    def _block(self, start: int, marker: int | None) -> int:
        """Reads the block that opens at `start`; `marker` is the next tag. Returns where the text goes on."""
        body = _space_end(self.text, start + len(self.opening))
        if not self.text.startswith("{", body):
            return self._no_object(start, body, marker)
        found = strict_json.extent(self.text, body)
        if found.end is not None and (after := self._after_object(found.end)) is not None:
            self._add(start, after, self.text[body : found.end])
            return after
        if found.cut_off:
            return self._malformed(start, len(self.text), "the text ends inside the JSON object")
        reason = "the JSON object is not valid" if found.end is None else "text follows the JSON object"
        return self._malformed(start, self._region_end(marker), reason)

    def _after_object(self, end: int) -> int | None:
        """Where the text goes on after a block whose object ends at `end`; None if something else follows."""
        rest = _space_end(self.text, end)
        if self.text.startswith(self.closing, rest):
            return rest + len(self.closing)
        if self.closing.startswith(self.text[rest : rest + len(self.closing)]):  # nothing, or a closing tag cut off
            return len(self.text)
        return rest if self.text.startswith(self.opening, rest) else None

    def _no_object(self, start: int, body: int, marker: int | None) -> int:
        """No object follows the opening tag: the block is malformed, or the text mentions the tag."""
        end, after = self._region_end(marker), start + len(self.opening)
        if marker is not None and self.markers[marker][1] == self.closing:
            inside = self.text[after : end - len(self.closing)]
            if not (self._inside_line(start) and _is_prose(inside)):
                return self._malformed(start, end, "there is no JSON object inside")
        elif body == len(self.text) and not self._inside_line(start):
            return self._malformed(start, end, "nothing follows the opening tag")
        self.content.append(self.opening)
        return after

    def _region_end(self, marker: int | None) -> int:
        """End of a malformed block: after its closing tag, before the next opening tag, or the end of the text."""
        if marker is None:
            return len(self.text)
        start, kind = self.markers[marker]
        return start + len(kind) if kind == self.closing else start

    def _inside_line(self, start: int) -> bool:
        """Whether other text stands before `start` on its line."""
        while start and self.text[start - 1] in " \t":
            start -= 1
        return start > 0 and self.text[start - 1] != "\n"

    def _add(self, start: int, end: int, payload: str) -> None:
        try:
            fields = strict_json.loads_object(payload)
            name, arguments = fields.get("name"), strict_json.call_arguments(fields.get("arguments"))
            if not isinstance(name, str) or not name:
                raise ValueError('"name" must be a non-empty string')
        except ValueError as error:
            self._malformed(start, end, str(error))
            return
        self.entries.append(ToolCall(name, arguments, f"call_{len(self.entries)}"))

    def _malformed(self, start: int, end: int, reason: str) -> int:
        self.entries.append(MalformedCall(reason, self.text[start : min(end, start + _EXCERPT)]))
        return end


def _space_end(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


def _is_prose(inside: str) -> bool:
    """Whether two tags are mentioned in a sentence, as in `<a> and </a>`: words between them, set off on both sides."""
    return not re.search(r"[\[\](){}\n]", inside) and re.fullmatch(r"[\s`'\",].*[\s`'\"]", inside) is not None
