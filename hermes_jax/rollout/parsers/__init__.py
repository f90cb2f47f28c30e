"""Tool-call formats by name."""

from __future__ import annotations

from collections.abc import Callable

from hermes_jax.rollout.parsers.base import MalformedCall, ParsedTurn, Parser, ToolCall
from hermes_jax.rollout.parsers.hermes import HermesParser

PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
}


def get_parser(name: str) -> Parser:
    """The parser of a format.

    Raises:
        ValueError: no such format; the message lists those there are.
    """
    if name not in PARSERS:
        raise ValueError(f"unknown tool_call_parser {name!r}; available: {', '.join(sorted(PARSERS))}")
    return PARSERS[name]()


__all__ = ["PARSERS", "MalformedCall", "ParsedTurn", "Parser", "ToolCall", "get_parser"]
