"""A system prompt that shows tools, for chat templates that don't."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def tool_system_prompt(tools: Sequence[Mapping[str, Any]], syntax: str, before: str = "") -> str:
    """Text that shows tools to the policy and says how to call them.

    Args:
        tools: schemas in OpenAI form.
        syntax: how a call is written: `Parser.syntax`.
        before: what stands first, such as the environment's own system prompt.
    """
    shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You can call these tools, described by JSON schemas:\n"
        f"<tools>\n{shown}\n</tools>\n"
        f"To call one, write {syntax}\n"
        "You may write several calls. Their results come back to you in the same order."
    )
    return f"{before}\n\n{text}" if before else text
