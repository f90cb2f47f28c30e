"""The built-in toolsets, under Hermes' names."""

from __future__ import annotations

from hermes_jax.tools.files import READ_FILE, WRITE_FILE
from hermes_jax.tools.registry import Tool
from hermes_jax.tools.terminal import TERMINAL

TOOLSETS: dict[str, tuple[Tool, ...]] = {
    "terminal": (TERMINAL,),
    "file": (READ_FILE, WRITE_FILE),
}
