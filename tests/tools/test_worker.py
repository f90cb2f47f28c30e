"""The worker server: deadlines that end anything, results side by side, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from hermes_jax.tools.sandbox import Sandbox, SandboxError
from hermes_jax.tools.worker import CallFailed, CallTimedOut, WorkerServer, WorkerServerDied, prepare
from tests.tools.processes import alive, below, eventually, open_files, with_marker

ROOT = Path(__file__).parents[2]
OWNER = """
import asyncio, os, sys
from hermes_jax.tools.sandbox import Sandbox, SandboxSettings
from hermes_jax.tools.worker import WorkerServer
mark = sys.argv[1]
def verifier():
    import subprocess
    subprocess.Popen(["sleep", mark], start_new_session=True)
    while True: pass
async def main():
    server = WorkerServer()
    boxes = [Sandbox(server), Sandbox(server), Sandbox(server, SandboxSettings(backend="local"))]
    await asyncio.gather(*(box.start() for box in boxes))
    work = [box.run(f"trap '' TERM; (setsid sleep {mark} &); sleep {mark}", 600) for box in boxes]
    print(server.pid, (await boxes[2].run("pwd", 20)).output.strip(), flush=True)
    await asyncio.gather(*work, server.call(verifier, timeout_s=600))
asyncio.run(main())
"""


def outcome_of(work: Coroutine[Any, Any, Any]) -> Any:
    async def run() -> Any:
        try:
            return await work
        except Exception as error:
            return error

    return asyncio.run(run())


def test_functions_of_every_kind_give_plain_results(server: WorkerServer) -> None:
    offset = 40

    async def later(x: int) -> int:
        await asyncio.sleep(0)
        return x + offset

    assert outcome_of(server.call(lambda x, y=0: [x, y, None, "ü"], 1, y=2.5, timeout_s=20)) == [1, 2.5, None, "ü"]
    assert outcome_of(server.call(later, 2, timeout_s=20)) == 42
    assert outcome_of(server.call(os.path.join, "a", "b", timeout_s=20)) == "a/b"
    assert isinstance(outcome_of(server.call(lambda: "x" * (3 << 20), timeout_s=20)), str)


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda: 1 / 0, "ZeroDivisionError", "division by zero"),
        (lambda: sys.exit(3), "SystemExit", "3"),
        (lambda: _raise(MemoryError()), "MemoryError", ""),
        (lambda: _raise(KeyboardInterrupt()), "KeyboardInterrupt", ""),
        (lambda: (lambda f: f(f))(lambda f: f(f)), "RecursionError", "maximum recursion depth"),
        (lambda: os._exit(7), "ProcessEnded", "exit code 7"),
        (lambda: os.kill(os.getpid(), 11), "ProcessEnded", "SIGSEGV"),
        (lambda: object(), "TypeError", "object"),
    ],
)
def test_what_a_function_does_to_itself_is_its_own_failure(
    server: WorkerServer, function: Any, error: str, message: str
) -> None:
    failure = outcome_of(server.call(function, timeout_s=20))
    assert isinstance(failure, CallFailed)
    assert failure.error == error
    assert message in failure.message
    assert outcome_of(server.call(lambda: 1, timeout_s=20)) == 1


def test_a_module_that_cannot_be_imported_is_a_failure(server: WorkerServer) -> None:
    def needs_it() -> None:
        import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401

    assert outcome_of(server.call(needs_it, timeout_s=20)).error == "ModuleNotFoundError"


def test_what_cannot_be_pickled_is_named(server: WorkerServer) -> None:
    lock = threading.Lock()
    failure = outcome_of(server.call(lambda: lock, timeout_s=20))
    assert isinstance(failure, TypeError)
    assert "<lambda>" in str(failure)
    assert "arguments of 'print'" in str(outcome_of(server.call(print, lock, timeout_s=20)))


def test_deadlines_end_busy_loops_with_their_children_and_calls_run_side_by_side(server: WorkerServer) -> None:
    mark = f"81{os.getpid()}.5"

    def spin(mark: str) -> None:
        subprocess.Popen(["sleep", mark], start_new_session=True)
        while True:
            pass

    async def run() -> list[Any]:
        spinning = [server.call(spin, mark, timeout_s=1.0) for _ in range(3)]
        return await asyncio.gather(*spinning, server.call(lambda: "fine", timeout_s=20), return_exceptions=True)

    begun = time.monotonic()
    *failures, result = asyncio.run(run())
    assert time.monotonic() - begun < 8
    assert result == "fine"
    assert [(type(f), str(f)) for f in failures] == [(CallTimedOut, "the call did not end within 1 s")] * 3
    assert eventually(lambda: not with_marker(mark))


def test_a_function_that_crashes_takes_what_it_started_with_it(server: WorkerServer) -> None:
    mark = f"85{os.getpid()}.5"

    def start_and_crash(mark: str) -> None:
        subprocess.Popen(["sleep", mark], start_new_session=True)
        os._exit(1)

    assert outcome_of(server.call(start_and_crash, mark, timeout_s=20)).error == "ProcessEnded"
    assert not with_marker(mark)


def test_more_calls_than_processes_wait_for_their_turn(server: WorkerServer) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(*(server.call(lambda x: x, number, timeout_s=20) for number in range(100)))

    assert asyncio.run(run()) == list(range(100))
    assert eventually(lambda: len(below(server.pid)) <= 2 + (os.cpu_count() or 1))


def test_a_cancelled_call_is_ended(server: WorkerServer) -> None:
    mark = f"82{os.getpid()}.5"

    def sleep(mark: str) -> None:
        subprocess.run(["sleep", mark], check=False)

    async def run() -> None:
        task = asyncio.create_task(server.call(sleep, mark, timeout_s=600))
        while not with_marker(mark):
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert eventually(lambda: not with_marker(mark))


def test_a_function_travels_once_prepared_and_is_loaded_once_per_process(server: WorkerServer) -> None:
    loads = 0

    def counting() -> tuple[int, int]:
        nonlocal loads
        loads += 1
        return os.getpid(), loads

    async def run() -> list[Any]:
        prepared = prepare(counting)
        return [await server.call(prepared, timeout_s=20) for _ in range(3)]

    results = asyncio.run(run())
    assert len({tuple(result) for result in results}) == 3
    assert max(count for _, count in results) == 3  # the same process, the same function


def test_the_server_and_its_children_never_import_jax(server: WorkerServer) -> None:
    def modules() -> list[str]:
        return sorted({"jax", "numpy", "torch"} & set(sys.modules))

    assert outcome_of(server.call(modules, timeout_s=20)) == []
    code = "import sys, hermes_jax.tools.worker_main, hermes_jax.rollout.rewards; print('jax' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert shown.stdout == "False\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_its_owner(number: signal.Signals) -> None:
    mark = f"83{os.getpid()}{int(number)}.5"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, mark], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    assert owner.stdout is not None
    pid, place = owner.stdout.readline().split()
    assert eventually(
        lambda: len(with_marker(mark)) >= 7
    )  # owner, six sleeps in sandboxes (and their shells), verifier's
    owner.send_signal(number)
    owner.wait(15)
    owner.stdout.close()
    assert eventually(lambda: not with_marker(mark) and not alive(int(pid)), 10)
    assert not Path(place).exists()


def test_a_dead_server_fails_every_pending_call_and_ends_its_children() -> None:
    mark = f"84{os.getpid()}.5"

    async def run() -> list[Any]:
        sandbox, idle = Sandbox(server), Sandbox(server)
        await asyncio.gather(sandbox.start(), idle.start())
        work = (sandbox.run(f"sleep {mark}", 100), server.call(time.sleep, 100, timeout_s=200))
        tasks = [asyncio.create_task(one) for one in work]
        while not with_marker(mark):
            await asyncio.sleep(0.02)
        os.kill(server.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        results += await asyncio.gather(server.call(len, "a", timeout_s=1), idle.run("true", 1), return_exceptions=True)
        await sandbox.close()
        return results

    with WorkerServer() as server:
        children = below(server.pid)
        results = asyncio.run(run())
        assert [type(result) for result in results] == [WorkerServerDied] * 4
        assert "exit code -9" in str(results[0])
        assert "--resume" in str(results[0])
    assert eventually(lambda: not with_marker(mark) and not any(map(alive, children)))


@pytest.mark.parametrize("idle", [True, False])
def test_guarded_work_ends_with_the_server(idle: bool) -> None:
    """Also work that has asked for nothing yet, that asks nothing more, or that swallows what it is told."""
    ended = []

    async def work() -> None:
        try:
            if not idle:
                await server.call(len, "ab", timeout_s=20)
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    async def answered() -> str:
        return "answer"

    async def fails() -> None:
        raise KeyError("own error")

    async def run() -> None:
        assert await server.guard(answered()) == "answer"
        with pytest.raises(KeyError, match="own error"):
            await server.guard(fails())
        asyncio.get_running_loop().call_later(1.0, os.kill, server.pid, signal.SIGKILL)
        with pytest.raises(WorkerServerDied, match="exit code -9"):
            await server.guard(work())
        assert ended == [True], "its clean-up was waited for"
        with pytest.raises(WorkerServerDied, match="exit code -9"):
            await server.guard(answered())

    with WorkerServer() as server:
        begun = time.monotonic()
        asyncio.run(run())
        assert time.monotonic() - begun < 10


def test_cancelled_guarded_work_is_cleaned_up(server: WorkerServer) -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(True)

    async def run() -> None:
        task = asyncio.create_task(server.guard(work()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert ended == [True]


def test_closing_leaves_nothing_and_later_use_says_so() -> None:
    before = open_files(os.getpid())

    async def use() -> Sandbox:
        sandbox = Sandbox(server)
        await sandbox.start()
        assert await server.call(len, "ab", timeout_s=20) == 2
        return sandbox

    with WorkerServer() as server:
        sandbox = asyncio.run(use())
        children = [server.pid, *below(server.pid)]
        assert len(children) >= 4
    assert not any(map(alive, children))
    assert open_files(os.getpid()) == before
    with pytest.raises(WorkerServerDied, match="was closed"):
        asyncio.run(sandbox.run("true", 1))
    server.close()


def test_it_can_be_used_from_one_event_loop_after_the_other(server: WorkerServer) -> None:
    for number in range(3):
        assert asyncio.run(server.call(abs, -number, timeout_s=20)) == number


def test_a_sandbox_ended_twice_or_unknown_is_no_trouble(server: WorkerServer) -> None:
    async def run() -> None:
        assert (await server.request("end", sandbox=10**6))[0]["id"] > 0
        fields, why = await server.request("ask", sandbox=10**6, words="kill", seconds=0.0)
        assert (fields["words"], why) == ("lost", b"the sandbox was ended")
        with pytest.raises(SandboxError, match="not started"):
            await Sandbox(server).run("true", 1)

    asyncio.run(run())
