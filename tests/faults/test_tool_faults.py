"""Faults of tools: process trees that resist, and output without end. Real commands in real sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_jax.tools.context import ToolContext
from hermes_jax.tools.registry import ToolResult
from hermes_jax.tools.sandbox import SandboxSettings
from hermes_jax.tools.terminal import TERMINAL
from hermes_jax.tools.worker import WorkerServer
from tests.data.cases import cases_io
from tests.tools.processes import alive, below, status_kib, with_marker

SCENARIOS = {scenario["id"]: scenario for scenario in cases_io.load("faults.json")["scenarios"]}


@pytest.fixture
def server() -> Iterator[WorkerServer]:
    with WorkerServer() as server:
        yield server


@pytest.mark.parametrize("backend", ["bubblewrap", "local"])
def test_grandchild_ignores_sigterm(server: WorkerServer, backend: str) -> None:
    scenario = SCENARIOS["grandchild-ignores-sigterm"]
    setup, expected = scenario["setup"], scenario["expected"]
    mark = f"heart{os.getpid()}"
    child = f"trap '' TERM HUP INT; while true; do echo {mark} >> heartbeat; sleep 0.1; done"
    command = f'bash -c "{child}" {mark} & setsid bash -c "{child}" {mark} & wait'
    begun = time.monotonic()

    async def run() -> tuple[ToolResult, bytes, bytes, list[int]]:
        context = ToolContext(server, SandboxSettings(backend=backend))
        try:
            result = await TERMINAL.call({"command": command, "timeout": setup["timeout_s"]}, context)
            processes = with_marker(mark)
            first = await context.read_bytes("heartbeat")
            await asyncio.sleep(expected["heartbeat_grows_after_s"])
            return result, first, await context.read_bytes("heartbeat"), processes
        finally:
            await context.cleanup()

    result, first, second, processes = asyncio.run(run())
    assert "timed out after 1 s" in result.content
    assert (result.timed_out, result.error) == (True, True)
    assert len(first) > 0
    assert (second != first) is expected["heartbeat_grows"]
    assert len(processes) == expected["live_processes"]
    assert [pid for pid in below(server.pid) if alive(pid)] == []
    assert time.monotonic() - begun < scenario["bound_s"]


def test_output_flood(server: WorkerServer) -> None:
    scenario = SCENARIOS["output-flood"]
    limit = scenario["setup"]["output_limit_bytes"]
    total = 2 * 10**9
    begun = time.monotonic()

    async def run() -> tuple[ToolResult, int]:
        context = ToolContext(server, SandboxSettings(), output_limit_bytes=limit)
        try:
            await context.terminal("true")
            pids = [os.getpid(), server.pid, *below(server.pid)]
            for pid in pids:
                with contextlib.suppress(PermissionError):  # the sandbox's, for an ordinary user; it is young anyway
                    Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets the peak so far
            before = sum(status_kib(pid, "VmRSS") for pid in pids)
            result = await TERMINAL.call({"command": f"echo begin; head -c {total} /dev/zero; echo end"}, context)
            return result, sum(status_kib(pid, "VmHWM") for pid in pids) - before
        finally:
            await context.cleanup()

    result, growth_kib = asyncio.run(run())
    assert result.content.startswith("begin\n")
    assert result.content.endswith("end")
    marker = re.search(r"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n", result.content)
    assert marker is not None
    assert int(marker[1]) == total + len("begin\nend\n") - limit
    assert len(result.content) <= limit + 100
    assert growth_kib / 1000 <= scenario["expected"]["peak_memory_growth_mb"]["max"]
    assert time.monotonic() - begun < scenario["bound_s"]
