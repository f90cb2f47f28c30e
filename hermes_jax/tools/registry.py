"""Tools that a policy can call, the toolsets that name them, and the checks between a call and its tool."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_jax.tools.arguments import argument_error, check_schema

if TYPE_CHECKING:
    from hermes_jax.tools.context import ToolContext


@dataclass(frozen=True)
class ToolResult:
    """What the model gets to read, and what the trainer counts.

    Args:
        content: text of the tool message.
        error: the call failed (wrong arguments, no such file, timeout); an exit code is no error.
        timed_out: a deadline ended it.
        bounded: the tool has cut the text itself where it was longer than the context's `output_limit_bytes`.
    """

    content: str
    error: bool = False
    timed_out: bool = False
    bounded: bool = False


ToolFunction = Callable[[dict[str, Any], "ToolContext"], Awaitable["ToolResult | str"]]


@dataclass(frozen=True)
class Tool:
    """A function that the policy can call.

    Args:
        name, description: as the model sees them.
        parameters: JSON schema of the arguments (type object), in the subset that `arguments` checks.
        function: coroutine function of (arguments, context of the episode); arguments have passed the schema.

    Raises:
        ValueError: a schema that cannot be checked.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: ToolFunction

    def __post_init__(self) -> None:
        check_schema(self.name, self.parameters)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Checks the arguments, as the model gave them, and runs the function; raises what the function raises."""
        wrong = argument_error(self.parameters, arguments)
        if wrong:
            return ToolResult(f"Error: wrong arguments for {self.name}: {wrong}", error=True)
        result = await self.function(dict(arguments), context)
        return ToolResult(result) if isinstance(result, str) else result

    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form, for the chat template or a request."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def resolve_toolsets(
    enabled: Iterable[str] | None = None,
    disabled: Iterable[str] = (),
    more: Mapping[str, Iterable[Tool]] | None = None,
) -> dict[str, Tool]:
    """Tools of the enabled toolsets without those of the disabled ones, by name, in the order of `enabled`.

    Args:
        enabled: names of toolsets; None, or the name "all", means every one.
        disabled: names of toolsets; their tools are taken out even if another toolset holds them too.
        more: toolsets of an environment, beside the built-in ones.

    Raises:
        ValueError: unknown toolset (with the nearest known name), or two tools of one name.
    """
    from hermes_jax.tools.toolsets import TOOLSETS  # the built-in tools need this module

    known = {**TOOLSETS, **{name: tuple(tools) for name, tools in (more or {}).items()}}
    chosen: list[str] = []
    for name in ["all"] if enabled is None else enabled:
        chosen += list(known) if name in ("all", "*") else [_known(name, known)]
    removed = {tool.name for name in disabled for tool in known[_known(name, known)]}
    tools: dict[str, Tool] = {}
    for tool in (tool for name in dict.fromkeys(chosen) for tool in known[name]):
        if tools.setdefault(tool.name, tool) is not tool:
            raise ValueError(f"two different tools are named {tool.name!r}; rename one of them")
    return {name: tool for name, tool in tools.items() if name not in removed}


def _known(name: str, known: Mapping[str, Any]) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown toolset {name!r}; {hint}known toolsets: {', '.join(sorted(known))}")
