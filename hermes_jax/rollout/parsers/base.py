"""What every tool-call parser returns: the turn's text, its calls, and what was meant as a call but is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    """A call that can be dispatched. Whether the tool exists is the host's question.

    Args:
        name: non-empty.
        arguments: a JSON object; integers are exact, all numbers finite, all text encodable as UTF-8.
        id: differs among the calls of a turn.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True)
class MalformedCall:
    """Text that was meant as a call and can't be dispatched.

    Args:
        reason: what is wrong with it, for the model to read.
        text: how it began.
    """

    reason: str
    text: str


@dataclass(frozen=True)
class ParsedTurn:
    """One model turn, taken apart.

    Args:
        content: the text outside calls, malformed calls and thinking, without white space at its ends.
        entries: calls and malformed calls in the order of the text.
        reasoning: the text of thinking blocks.
    """

    content: str
    entries: tuple[ToolCall | MalformedCall, ...] = ()
    reasoning: str = ""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that can be dispatched, in order."""
        return tuple(e for e in self.entries if isinstance(e, ToolCall))

    @property
    def errors(self) -> tuple[MalformedCall, ...]:
        """The malformed calls, in order."""
        return tuple(e for e in self.entries if isinstance(e, MalformedCall))


class Parser(Protocol):
    """Reads tool calls in one format. Never raises, whatever the text; takes time linear in its length."""

    syntax: str
    """How a call is written, for error messages to the model."""

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, thinking_open: bool = False
    ) -> ParsedTurn:
        """Takes one whole model turn apart.

        Args:
            text: the turn, decoded as a whole, without its end marker.
            tools: schemas in OpenAI form, for formats whose values carry no type.
            thinking_open: the generation prompt opened a thinking block, so the turn begins inside it.
        """
        ...
