"""tool_parsers cases to the project's parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hermes_jax.rollout.parsers import PARSERS, get_parser


def parse_tool_calls(format: str, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """One model turn, taken apart by the parser of a format."""
    if format not in PARSERS:
        raise NotImplementedError(f"tool-call format {format}")
    turn = get_parser(format).parse(text, tools)
    return {
        "content": turn.content,
        "calls": [{"name": call.name, "arguments": dict(call.arguments), "id": call.id} for call in turn.calls],
        "errors": len(turn.errors),
    }
