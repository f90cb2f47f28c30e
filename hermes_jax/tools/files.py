"""The tools `read_file` and `write_file`, on the files of the episode's sandbox."""

from __future__ import annotations

from typing import Any

from hermes_jax.tools.context import ToolContext
from hermes_jax.tools.registry import Tool, ToolResult
from hermes_jax.tools.sandbox import shortened

_READ_LIMIT_BYTES = 16 << 20


async def _read_file(arguments: dict[str, Any], context: ToolContext) -> ToolResult:
    path = arguments["path"]
    try:
        content = await context.read_bytes(path, _READ_LIMIT_BYTES)
    except OSError as error:
        return ToolResult(f"Error: cannot read {path}: {error.strerror}", error=True)
    return ToolResult(shortened(content, context.output_limit_bytes) or "(empty file)", bounded=True)


async def _write_file(arguments: dict[str, Any], context: ToolContext) -> ToolResult:
    path = arguments["path"]
    content = arguments["content"].encode("utf-8", errors="surrogatepass")
    try:
        await context.write_file(path, content)
    except OSError as error:
        return ToolResult(f"Error: cannot write {path}: {error.strerror}", error=True)
    return ToolResult(f"wrote {len(content)} bytes to {path}")


READ_FILE = Tool(
    name="read_file",
    description="Read a text file.",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Path of the file."}},
        "required": ["path"],
    },
    function=_read_file,
)

WRITE_FILE = Tool(
    name="write_file",
    description="Write a text file, replacing what it held.",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Path of the file."},
            "content": {"type": "string", "description": "The whole new content."},
        },
        "required": ["path", "content"],
    },
    function=_write_file,
)
