"""200 episodes with a real sandboxed command each, every fifth of which fails: nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path

from hermes_jax.tools.context import ToolContext
from hermes_jax.tools.sandbox import SandboxSettings
from hermes_jax.tools.terminal import TERMINAL
from hermes_jax.tools.worker import WorkerServer
from tests.data.cases import cases_io
from tests.tools.processes import alive, below, open_files

[SCENARIO] = (one for one in cases_io.load("faults.json")["scenarios"] if one["id"] == "leak-over-many-rollouts")


def counts(server: WorkerServer) -> dict[str, int]:
    return {
        "threads": threading.active_count(),
        "files": open_files(os.getpid()),
        "server_files": open_files(server.pid),
        "server_threads": len(os.listdir(f"/proc/{server.pid}/task")),
        "processes": len([pid for pid in below(server.pid) if alive(pid)]),
        "asyncio_tasks": len(asyncio.all_tasks()),
        "temporary": len(list(Path(tempfile.gettempdir()).glob("hermes-jax-*"))),
    }


async def episode(server: WorkerServer, number: int, every: int) -> str:
    """One command in its own sandbox; every fifth episode fails, each time in another way."""
    backend = "local" if number % 10 < 2 else "bubblewrap"
    context = ToolContext(server, SandboxSettings(backend=backend))
    command = f"mkdir -p d; echo {number} > d/f; cat d/f"
    try:
        if number % every:
            return (await TERMINAL.call({"command": command}, context)).content
        match number // every % 4:
            case 0:
                await TERMINAL.call({"command": command}, context)
                raise RuntimeError("the verifier broke")
            case 1:
                return (await TERMINAL.call({"command": "sleep 60 & sleep 60", "timeout": 0.2}, context)).content
            case 2:
                async with asyncio.timeout(0.05):
                    await context.terminal("sleep 60")
            case _:
                await context.read_file("no such file")
        return "not reached"
    finally:
        await context.cleanup()


def test_leak_over_many_rollouts() -> None:
    expected, setup = SCENARIO["expected"], SCENARIO["setup"]
    begun = time.monotonic()

    async def run(server: WorkerServer) -> tuple[dict[str, int], dict[str, int], list[str | BaseException]]:
        await asyncio.gather(*(episode(server, number, 5) for number in range(1, 5)))  # warm
        before = counts(server)
        slots = asyncio.Semaphore(16)

        async def bounded(number: int) -> str:
            async with slots:
                return await episode(server, number, every=5)

        work = (bounded(number) for number in range(setup["rollouts"]))
        results = await asyncio.gather(*work, return_exceptions=True)
        return before, counts(server), results

    with WorkerServer() as server:
        before, after, results = asyncio.run(run(server))
    assert sum(result == str(number) for number, result in enumerate(results)) == 160
    assert sum(isinstance(result, BaseException) for result in results) == 30
    assert after["threads"] == before["threads"]
    assert after["server_threads"] == before["server_threads"]
    assert after["files"] - before["files"] <= expected["file_descriptors"]["growth_max"]
    assert after["server_files"] - before["server_files"] <= expected["file_descriptors"]["growth_max"]
    assert after["asyncio_tasks"] == before["asyncio_tasks"]
    assert after["temporary"] - before["temporary"] == expected["temporary_directories"]
    assert after["processes"] == 0
    assert time.monotonic() - begun < SCENARIO["bound_s"]
