"""The `terminal` tool: a shell command in the episode's sandbox."""

from __future__ import annotations

from typing import Any

from hermes_jax.tools.context import ToolContext
from hermes_jax.tools.registry import Tool, ToolResult
from hermes_jax.tools.sandbox import CommandResult

_ENDED = {
    "processes": "killed: too many processes at once",
    "memory": "killed: too much memory in use",
    "interrupted": "interrupted",
}


async def _terminal(arguments: dict[str, Any], context: ToolContext) -> ToolResult:
    limit = min(arguments.get("timeout", context.terminal_timeout_s), context.terminal_timeout_s)
    result = await context.terminal(arguments["command"], limit)
    text, failed = describe(result, limit), result.exit_code is None
    return ToolResult(text, error=failed, timed_out=result.timed_out, bounded=True)


def describe(result: CommandResult, timeout_s: float) -> str:
    """A command's output and, where it did not end well, how it ended, as text for the model."""
    lines = [result.output.removesuffix("\n")] if result.output else []
    if result.timed_out:
        lines.append(f"(timed out after {timeout_s:g} s; all processes were killed)")
    elif result.exit_code is None:
        lines.append(f"({_ENDED[result.ended]})")
    elif result.exit_code != 0:
        lines.append(f"(exit code {result.exit_code})")
    return "\n".join(lines) or "(no output)"


TERMINAL = Tool(
    name="terminal",
    description="Run a shell command and get its output.",
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command for bash."},
            "timeout": {"type": "number", "minimum": 0.001, "description": "Longest time it may take, in seconds."},
        },
        "required": ["command"],
    },
    function=_terminal,
)
