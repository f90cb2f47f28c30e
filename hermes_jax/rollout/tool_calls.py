"""Running the calls of a model turn: every call gets an answer that the model can read, whatever happens."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hermes_jax.clock import Clock
from hermes_jax.rollout.deadline import DeadlinePassed, before
from hermes_jax.rollout.parsers.base import MalformedCall, ToolCall
from hermes_jax.tools.registry import ToolResult
from hermes_jax.tools.sandbox import SandboxError, shortened
from hermes_jax.tools.worker import WorkerServerDied

INFRASTRUCTURE = (SandboxError, WorkerServerDied)
"""Failures of the sandbox itself: no fault of the call, and no lesson for the model."""


class CallableTool(Protocol):
    """What a tool offers to the agent loop; its result is a ToolResult or a string."""

    async def call(self, arguments: dict[str, Any], ctx: Any, /) -> Any: ...


@dataclass(frozen=True)
class Answer:
    """What a call came to.

    Args:
        content: text for the model.
        failed: "" (it ran), "malformed", "unknown" (no such tool), "error" or "timeout".
    """

    content: str
    failed: str = ""


@dataclass(frozen=True)
class ToolRunner:
    """Runs calls one after the other; they share the episode's sandbox, so their order is part of what they mean.

    Args:
        tools: by name.
        ctx: the episode's ToolContext.
        clock: measures the deadlines.
        timeout_s: deadline of one call.
        output_limit_bytes: so much of a result (in UTF-8) is shown to the model, a mark that it was cut aside.
        syntax: how a call is written, told to a model that got it wrong.
    """

    tools: Mapping[str, CallableTool]
    ctx: Any
    clock: Clock
    timeout_s: float = math.inf
    output_limit_bytes: int | None = None
    syntax: str = ""

    async def answer(self, entry: ToolCall | MalformedCall, deadline: float = math.inf) -> Answer:
        """Runs one call, or says why it can't be run.

        Raises:
            DeadlinePassed: `deadline`, the episode's own, passed meanwhile; the tool was cancelled.
            SandboxError, WorkerServerDied: the sandbox failed.
        """
        if isinstance(entry, MalformedCall):
            text = f"Error: this tool call can't be read: {entry.reason}. It begins: {entry.text}"
            return Answer(f"{readable(text)}\nWrite calls as {self.syntax}", "malformed")
        tool = self.tools.get(entry.name)
        if tool is None:
            available = ", ".join(sorted(self.tools)) or "none"
            name = shortened(readable(entry.name).encode(), 100)
            return Answer(f"Error: there is no tool named {name!r}. Available tools: {available}", "unknown")
        return await self._run(tool, entry, deadline)

    async def _run(self, tool: CallableTool, call: ToolCall, deadline: float) -> Answer:
        ends = min(deadline, self.clock.now() + self.timeout_s)
        try:
            result = await before(ends, self.clock, tool.call(copy.deepcopy(dict(call.arguments)), self.ctx))
        except DeadlinePassed:
            if ends == deadline:
                raise
            return Answer(f"Error: {call.name} was stopped: it did not finish within {self.timeout_s:g} s", "timeout")
        except INFRASTRUCTURE:
            raise
        except Exception as error:
            result = ToolResult(f"Error: {call.name} failed: {type(error).__name__}: {error}", error=True)
        if isinstance(result, str):
            result = ToolResult(result)
        text = readable(result.content)
        if not result.bounded and self.output_limit_bytes is not None:
            text = shortened(text.encode(), self.output_limit_bytes)
        return Answer(text, "timeout" if result.timed_out else "error" if result.error else "")


def readable(text: str) -> str:
    """The text as UTF-8 can carry it: halves of surrogate pairs become U+FFFD, all else stays as it is."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
