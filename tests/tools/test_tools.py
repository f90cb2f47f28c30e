"""The built-in tools for real, argument checks, and toolsets by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hermes_jax.tools.arguments import argument_error
from hermes_jax.tools.context import ToolContext, make_context
from hermes_jax.tools.registry import Tool, ToolResult, resolve_toolsets
from hermes_jax.tools.sandbox import SandboxError, SandboxSettings
from hermes_jax.tools.worker import WorkerServer
from tests.tools.processes import alive, below

TOOLS = resolve_toolsets(["terminal", "file"])


def with_context(server: WorkerServer, work: Callable[[ToolContext], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        context = make_context(server, **options)
        try:
            return await work(context)
        finally:
            await context.cleanup()

    return asyncio.run(run())


def calls(server: WorkerServer, *given: tuple[str, dict[str, Any]], **options: Any) -> list[ToolResult]:
    async def work(context: ToolContext) -> list[ToolResult]:
        return [await TOOLS[name].call(arguments, context) for name, arguments in given]

    return with_context(server, work, **options)


def test_terminal_and_files_share_one_place(server: WorkerServer) -> None:
    results = calls(
        server,
        ("write_file", {"path": "a/greeting.txt", "content": "hällo\n"}),
        ("terminal", {"command": "cat a/greeting.txt; seq 3 > n"}),
        ("read_file", {"path": "n"}),
        ("terminal", {"command": "true"}),
        ("terminal", {"command": "echo no; exit 4"}),
        ("read_file", {"path": "none"}),
        ("write_file", {"path": "a", "content": ""}),
        ("read_file", {"path": "a"}),
    )
    assert [result.content for result in results] == [
        "wrote 7 bytes to a/greeting.txt",
        "hällo",
        "1\n2\n3\n",
        "(no output)",
        "no\n(exit code 4)",
        "Error: cannot read none: No such file or directory",
        "Error: cannot write a: Is a directory",
        "Error: cannot read a: Is a directory",
    ]
    assert [result.error for result in results] == [False] * 5 + [True] * 3


def test_timeouts_say_so_and_obey_the_environments_limit(server: WorkerServer) -> None:
    asked, limited = calls(
        server,
        ("terminal", {"command": "echo begun; sleep 50", "timeout": 0.5}),
        ("terminal", {"command": "sleep 50", "timeout": 40}),
        terminal_timeout_s=1,
    )
    text = "begun\n(timed out after 0.5 s; all processes were killed)"
    assert asked == ToolResult(text, error=True, timed_out=True, bounded=True)
    assert limited.content == "(timed out after 1 s; all processes were killed)"


def test_long_output_and_files_keep_head_and_tail(server: WorkerServer) -> None:
    flood, file = calls(
        server,
        ("terminal", {"command": "seq 100000 | tee f"}),
        ("read_file", {"path": "f"}),
        output_limit_bytes=100,
    )
    assert flood.content.startswith("1\n2\n3\n")
    assert flood.content.endswith("99999\n100000")
    assert "[... 588795 bytes left out ...]" in flood.content
    assert file.content == flood.content + "\n"


@pytest.mark.parametrize("limit", range(100, 113))
def test_the_limit_is_in_bytes_and_cuts_no_character(server: WorkerServer, limit: int) -> None:
    text = "aü€🦀" * 30  # 1, 2, 3 and 4 bytes: 300 in all
    show, read = calls(
        server,
        ("terminal", {"command": f"printf %s '{text}' | tee f; false"}),
        ("read_file", {"path": "f"}),
        output_limit_bytes=limit,
    )
    assert show.content == read.content + "\n(exit code 1)"
    assert show.bounded
    assert read.bounded
    head, omitted, tail = read.content.split("\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    shown = len((head + tail).encode())
    assert limit - 6 <= shown <= limit
    assert omitted == f"[... {300 - shown} bytes left out ...]"


def test_arguments_are_checked_and_never_converted(server: WorkerServer) -> None:
    wrong = calls(
        server,
        ("terminal", {}),
        ("terminal", {"command": 5}),
        ("terminal", {"comand": "ls", "command": "ls"}),
        ("terminal", {"command": "ls", "timeout": "5"}),
        ("terminal", {"command": "ls", "timeout": True}),
        ("terminal", {"command": "ls", "timeout": -1}),
        ("terminal", {"command": None}),
    )
    assert all(result.error for result in wrong)
    assert [result.content.removeprefix("Error: wrong arguments for terminal: ") for result in wrong] == [
        "'command' is missing",
        "'command' must be a string, got an integer: 5",
        "'comand' is unknown; did you mean 'command'?",
        "'timeout' must be a number, got a string: '5'",
        "'timeout' must be a number, got a boolean: True",
        "'timeout' must lie between 0.001 and inf, got -1",
        "'command' must be a string, got null: None",
    ]


def test_inner_objects_lists_and_choices_are_checked() -> None:
    schema = {
        "type": "object",
        "properties": {
            "mode": {"enum": ["a", "b", 1]},
            "points": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "integer"}}}},
            "free": {"type": "object"},
            "maybe": {"type": ["integer", "null"]},
            "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
    }
    fine = {"mode": 1, "points": [{"x": 1}, {}], "free": {"any": [1]}, "maybe": None, "map": {"k": 2}}
    assert argument_error(schema, fine) == ""
    for name, value, message in (
        ("mode", True, "'mode' must be one of ['a', 'b', 1], got a boolean: True"),
        ("points", [{"x": 1}, {"x": 1.0}], "'points'[1].x must be an integer, got a number: 1.0"),
        ("points", [{"y": 1}], "'points'[0].y is unknown; known: x"),
        ("maybe", "1", "'maybe' must be an integer or null, got a string: '1'"),
        ("map", {"k": "2"}, "'map'.k must be an integer, got a string: '2'"),
    ):
        assert argument_error(schema, {name: value}) == message


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array"}, "type object"),
        ({"type": "object", "properties": {"x": {"type": "strnig"}}}, r"parameters\.x has the unknown type 'strnig'"),
        ({"type": "object", "properties": {"x": {"pattern": "a+"}}}, r"'pattern', which is not checked"),
        ({"type": "object", "required": ["x"]}, "requires 'x'"),
    ],
)
def test_schemas_that_cannot_be_checked_are_refused(parameters: dict[str, Any], message: str) -> None:
    async def nothing(arguments: dict[str, Any], context: ToolContext) -> str:
        return ""

    with pytest.raises(ValueError, match=message):
        Tool("mine", "", parameters, nothing)


def test_toolsets_by_name() -> None:
    async def nothing(arguments: dict[str, Any], context: ToolContext) -> str:
        return "nothing"

    mine = Tool("mine", "Mine.", {"type": "object", "properties": {}}, nothing)
    impostor = Tool("terminal", "Not it.", {"type": "object", "properties": {}}, nothing)
    assert list(resolve_toolsets(["file", "terminal"])) == ["read_file", "write_file", "terminal"]
    assert list(resolve_toolsets()) == ["terminal", "read_file", "write_file"]
    assert list(resolve_toolsets(["all"], disabled=["terminal"])) == ["read_file", "write_file"]
    assert list(resolve_toolsets(["mine", "file"], more={"mine": [mine]})) == ["mine", "read_file", "write_file"]
    assert resolve_toolsets([]) == {}
    with pytest.raises(ValueError, match=r"'terminall'; did you mean 'terminal'\? known toolsets: file, terminal"):
        resolve_toolsets(["terminall"])
    with pytest.raises(ValueError, match="unknown toolset 'files'"):
        resolve_toolsets(["file"], disabled=["files"])
    with pytest.raises(ValueError, match="two different tools are named 'terminal'"):
        resolve_toolsets(["terminal", "mine"], more={"mine": [impostor]})
    assert mine.schema() == {
        "type": "function",
        "function": {"name": "mine", "description": "Mine.", "parameters": {"type": "object", "properties": {}}},
    }


def test_a_text_is_a_result(server: WorkerServer) -> None:
    async def echo(arguments: dict[str, Any], context: ToolContext) -> str:
        context.state["seen"] = arguments
        return f"you said {arguments['x']}"

    tool = Tool("echo", "", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, echo)

    async def work(context: ToolContext) -> None:
        assert await tool.call({"x": 3}, context) == ToolResult("you said 3")
        assert context.state == {"seen": {"x": 3}}
        assert not context.started

    with_context(server, work)


def test_context_starts_late_and_cleans_up_always(server: WorkerServer) -> None:
    async def run() -> None:
        unused = make_context(server)
        await unused.kill_all()
        await unused.cleanup()
        await unused.cleanup()
        assert not unused.started

        used = make_context(server)
        first, second = await asyncio.gather(used.terminal("echo 1 > a; sleep 60 &"), used.terminal("echo 2"))
        assert (first.exit_code, second.output) == (0, "2\n")
        assert used.sandbox_start_s > 0
        await used.kill_all()
        assert await used.read_file("a") == "1\n"
        await used.write_file("b", b"\xff")
        assert await used.read_file("b") == "�"
        assert await used.read_bytes("b") == b"\xff"
        await asyncio.gather(used.cleanup(), used.cleanup())
        with pytest.raises(SandboxError, match="cleaned up"):
            await used.terminal("true")

    asyncio.run(run())
    assert not [pid for pid in below(server.pid) if alive(pid)]


@pytest.mark.parametrize("when_s", [0.0, 0.002, 0.01, 0.03, 0.1])
def test_an_episode_cancelled_at_any_moment_leaves_nothing(server: WorkerServer, when_s: float) -> None:
    async def episode(context: ToolContext) -> None:
        try:
            await context.terminal("sleep 60")
        finally:
            await context.cleanup()

    async def run() -> None:
        before = len(asyncio.all_tasks())
        task = asyncio.create_task(episode(make_context(server)))
        await asyncio.sleep(when_s)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert len(asyncio.all_tasks()) == before

    asyncio.run(run())
    assert not [pid for pid in below(server.pid) if alive(pid)]


def test_a_sandbox_that_does_not_start_fails_every_use_and_cleans_up(server: WorkerServer) -> None:
    async def work(context: ToolContext) -> None:
        for _ in range(2):
            with pytest.raises(SandboxError, match="no-such-place"):
                await context.terminal("true")

    with_context(server, work, settings=SandboxSettings(read_only=("/no-such-place",)))


def test_the_event_loop_is_never_held_up(server: WorkerServer) -> None:
    async def work(context: ToolContext) -> float:
        longest, last = 0.0, asyncio.get_running_loop().time()
        task = asyncio.create_task(context.terminal("head -c 50000000 /dev/zero; sleep 0.2"))
        while not task.done():
            await asyncio.sleep(0.005)
            now = asyncio.get_running_loop().time()
            longest, last = max(longest, now - last), now
        await task
        return longest

    assert with_context(server, work) < 0.5  # a busy machine may add some
