"""Real commands in real sandboxes: results, limits, isolation, and commands that try to break out or in."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hermes_jax.tools.sandbox import Sandbox, SandboxError, SandboxSettings, head_and_tail, shortened
from hermes_jax.tools.worker import WorkerServer
from tests.tools.processes import alive, below, with_marker

T = TypeVar("T")
BACKENDS = ("bubblewrap", "local")


def inside(server: WorkerServer, work: Callable[[Sandbox], Awaitable[T]], **settings: Any) -> T:
    """Result of `work` in a fresh sandbox."""

    async def run() -> T:
        sandbox = Sandbox(server, SandboxSettings(**settings))
        await sandbox.start()
        try:
            return await work(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(run())


def output(server: WorkerServer, command: str, timeout_s: float = 20.0, **settings: Any) -> str:
    async def work(sandbox: Sandbox) -> str:
        return (await sandbox.run(command, timeout_s)).output

    return inside(server, work, **settings)


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_exit_code_and_files_of_one_sandbox(server: WorkerServer, backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        first = await sandbox.run("echo out; echo err >&2; mkdir -p d; printf 'a\\nb' > d/file; exit 3", 20)
        assert (first.output, first.exit_code, first.timed_out, first.omitted_bytes) == ("out\nerr\n", 3, False, 0)
        assert await sandbox.read_file("d/file") == b"a\nb"
        await sandbox.write_file("new/x.bin", bytes(range(256)))
        second = await sandbox.run("cat new/x.bin | wc -c; pwd; kill -9 $$", 20)
        assert second.output.splitlines()[0] == "256"
        assert second.exit_code == 128 + signal.SIGKILL

    inside(server, work, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_standard_input_and_no_foreign_descriptors(server: WorkerServer, backend: str) -> None:
    shown = output(server, "cat; ls /proc/self/fd | tr '\\n' ' '", backend=backend)
    assert shown.split() == ["0", "1", "2", "3"]  # 3 is the directory that ls reads


def test_invalid_utf8_is_replaced_and_nul_passes(server: WorkerServer) -> None:
    assert output(server, r"printf 'a\xffb\x00c\xe2\x82\xac'") == "a�b\x00c€"


def test_two_sandboxes_share_nothing(server: WorkerServer) -> None:
    async def run() -> None:
        one, two = Sandbox(server), Sandbox(server)
        await asyncio.gather(one.start(), two.start())
        await one.run("echo secret > /workspace/f; echo secret > /tmp/f; echo secret > /dev/shm/f; sleep 60 & ", 20)
        seen = await two.run("ls /workspace /tmp /dev/shm; ls -d /proc/[0-9]* | wc -l", 20)
        assert "f" not in seen.output.split()
        assert int(seen.output.split()[-1]) <= 6
        await asyncio.gather(one.close(), two.close())

    asyncio.run(run())


def test_network_home_and_host_processes_are_out_of_reach(server: WorkerServer, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("secret")
    commands = (
        f"cat {tmp_path}/weights; ls {Path(__file__).parents[2]}; ls /home; cat /etc/shadow",
        "(exec 3<>/dev/tcp/127.0.0.1/22) 2>&1 | grep -o 'refused\\|unreachable'; cat /proc/net/dev | wc -l",
        "id -u; unshare -Ur true; mount -t tmpfs x /tmp; env",
    )
    shown = "\n".join(output(server, command) for command in commands)
    assert "secret" not in shown
    assert "README" not in shown
    assert "root:" not in shown
    assert "1000" in shown.splitlines()
    assert "unshare:" in shown
    assert "mount:" in shown
    assert "PYTEST_CURRENT_TEST" in os.environ
    assert "PYTEST" not in shown


def test_only_the_workspace_and_temporary_places_can_be_written(server: WorkerServer) -> None:
    places = "/ /usr /etc /dev /run /proc/sys/vm/swappiness /workspace /tmp /dev/shm"
    command = f"for p in {places}; do [ -d $p ] && f=$p/new || f=$p; (echo 60 > $f) 2>/dev/null && echo $p; done"
    assert output(server, command).split() == ["/workspace", "/tmp", "/dev/shm"]


def test_further_places_can_be_shown_read_only(server: WorkerServer, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("shown")
    shown = output(server, f"cat {tmp_path}/data; touch {tmp_path}/new", read_only=(str(tmp_path),))
    assert shown.startswith("shown")
    assert "Read-only file system" in shown


def test_sizes_are_limited(server: WorkerServer) -> None:
    limits = {"workspace_bytes": 4 << 20, "tmp_bytes": 2 << 20, "file_bytes": 3 << 20, "memory_bytes": 256 << 20}

    async def work(sandbox: Sandbox) -> None:
        shown = await sandbox.run(
            "head -c 9M /dev/zero > a; head -c 9M /dev/zero > b; head -c 9M /dev/zero > /tmp/c; stat -c %s a b /tmp/c",
            20,
        )
        sizes = [int(word) for word in shown.output.split() if word.isdigit()][-3:]
        assert sizes[0] == 3 << 20
        assert sum(sizes[:2]) <= 4 << 20
        assert sizes[2] <= 2 << 20
        with pytest.raises(OSError, match="No space left") as full:
            await sandbox.write_file("more", bytes(3 << 20))
        assert full.value.errno == errno.ENOSPC
        greedy = await sandbox.run("python3 -c 'bytearray(400 << 20)'", 20)
        assert "MemoryError" in greedy.output

    inside(server, work, **limits)


def test_many_processes_or_much_memory_together_are_ended(server: WorkerServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        bomb = await sandbox.run("for i in $(seq 30); do sleep 50 & done; sleep 60", 30)
        assert (bomb.ended, bomb.exit_code, bomb.timed_out) == ("processes", None, False)
        eater = "import os, time\nfor _ in range(4): os.fork()\nx = b'x' * (12 << 20)\ntime.sleep(50)"
        big = await sandbox.run(f'python3 -c "{eater}"', 30)
        assert big.ended == "memory"
        after = await sandbox.run("ls -d /proc/[0-9]* | wc -l", 20)
        assert int(after.output) <= 4

    inside(server, work, processes=20, memory_bytes=128 << 20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_background_processes_live_until_kill_all(server: WorkerServer, backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        begun = time.monotonic()
        first = await sandbox.run("(while true; do echo tick; echo x >> beat; sleep 0.05; done) & echo started", 20)
        assert time.monotonic() - begun < 10
        assert "started" in first.output
        await asyncio.sleep(0.3)
        one = await sandbox.read_file("beat")
        await asyncio.sleep(0.3)
        two = await sandbox.read_file("beat")
        assert len(two) > len(one) > 0  # its output went on being read: it did not die of a closed pipe
        await sandbox.kill_all()
        three = await sandbox.read_file("beat")
        await asyncio.sleep(0.3)
        assert await sandbox.read_file("beat") == three

    inside(server, work, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_timeout_ends_sessions_and_ignored_signals(server: WorkerServer, backend: str) -> None:
    marker = f"77{os.getpid()}.5"

    async def work(sandbox: Sandbox) -> None:
        command = f"trap '' TERM HUP INT; setsid nohup sleep {marker} & (setsid sleep {marker} &) ; sleep {marker}"
        result = await sandbox.run(command, 0.5)
        assert (result.timed_out, result.exit_code) == (True, None)
        assert with_marker(marker) == []
        assert (await sandbox.run("echo still here", 20)).output == "still here\n"

    inside(server, work, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_commands_yield_to_the_trainer_and_signal_their_own_group_only(server: WorkerServer, backend: str) -> None:
    """A session of its own would get, on many systems, as large a share of the processors as the whole trainer."""
    marker = f"79{os.getpid()}.5"

    async def work(sandbox: Sandbox) -> None:
        neighbour = Sandbox(server, SandboxSettings(backend=backend))
        await neighbour.start()
        kept = asyncio.create_task(neighbour.run(f"sleep {marker}", 100))
        while not (pids := with_marker(marker)):
            await asyncio.sleep(0.01)
        for pid in pids:
            assert os.getsid(pid) == os.getsid(server.pid) != os.getsid(0)
            assert os.getpgid(pid) != os.getpgid(server.pid)
            assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5
        assert (await sandbox.run("kill -9 0", 20)).exit_code == 128 + signal.SIGKILL
        assert (await sandbox.run("echo still here; test -c /dev/tty && cat /dev/tty", 20)).output.startswith("still")
        assert with_marker(marker) == pids
        kept.cancel()
        await neighbour.close()

    inside(server, work, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_command_is_ended_and_the_sandbox_stays_usable(server: WorkerServer, backend: str) -> None:
    marker = f"78{os.getpid()}.5"

    async def work(sandbox: Sandbox) -> None:
        await sandbox.write_file("kept", b"yes")
        task = asyncio.create_task(sandbox.run(f"sleep {marker}", 100))
        while not with_marker(marker):
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert await sandbox.read_file("kept") == b"yes"
        assert with_marker(marker) == []

    inside(server, work, backend=backend)


def test_cancelling_one_waiting_request_leaves_the_running_one_alone(server: WorkerServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.run("sleep 0.5; echo done", 20))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(sandbox.run("echo never", 20))
        await asyncio.sleep(0.1)
        waiting.cancel()
        assert (await running).output == "done\n"

    inside(server, work)


def test_files_are_opened_with_care(server: WorkerServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.run("mkfifo pipe; ln -s /etc/shadow link; mkdir d; head -c 5000 /dev/zero > long", 20)
        for path, number in (
            ("none", errno.ENOENT),
            ("pipe", errno.EINVAL),
            ("d", errno.EISDIR),
            ("link", errno.ENOENT),
        ):
            with pytest.raises(OSError, match=path) as error:
                await sandbox.read_file(path)
            assert error.value.errno == number
        with pytest.raises(OSError, match="more than 4999") as error:
            await sandbox.read_file("long", limit_bytes=4999)
        assert error.value.errno == errno.EFBIG
        assert len(await sandbox.read_file("long", limit_bytes=5000)) == 5000
        for path in ("pipe", "d", "/usr/x", "/dev/null", "", "a\0b"):
            with pytest.raises(OSError, match=r".*"):
                await sandbox.write_file(path, b"x")
        await sandbox.write_file("'; touch pwned; '", b"x")  # no shell sees a path
        assert "pwned" not in (await sandbox.run("ls", 20)).output.splitlines()

    inside(server, work)


def test_links_can_be_refused(server: WorkerServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.run("mkdir d; echo x > d/file; ln -s d e; ln -s d/file symbolic; echo y > one; ln one hard", 20)
        for path in ("d/file", "e/file"):
            assert await sandbox.read_file(path, links=False) == b"x\n"
        for path, content, number in (
            ("symbolic", b"x\n", errno.ELOOP),
            ("hard", b"y\n", errno.EMLINK),
            ("one", b"y\n", errno.EMLINK),
        ):
            assert await sandbox.read_file(path) == content
            with pytest.raises(OSError, match=path) as error:
                await sandbox.read_file(path, links=False)
            assert error.value.errno == number
        await sandbox.run("rm hard", 20)
        assert await sandbox.read_file("one", links=False) == b"y\n"

    inside(server, work)


@pytest.mark.parametrize("levels", [3, 1900, 2100, 100_000])
def test_a_path_of_any_depth_is_a_file_or_an_oserror(server: WorkerServer, levels: int) -> None:
    """Never a failure of the sandbox: a policy could end its episode as nobody's fault with that."""

    async def work(sandbox: Sandbox) -> None:
        path = "d/" * levels + "file"
        if len(path) < 4096:
            await sandbox.write_file(path, b"x")
            assert await sandbox.read_file(path) == b"x"
            await sandbox.write_file("d//e/./f", b"y")
            assert await sandbox.read_file("d/e/f") == b"y"
            return
        for use in (sandbox.read_file(path), sandbox.write_file(path, b"x")):
            with pytest.raises(OSError, match="too long") as error:
                await use
            assert error.value.errno == errno.ENAMETOOLONG
        assert (await sandbox.run("ls", 20)).output == ""

    inside(server, work)


def test_a_command_cannot_kill_stop_trace_or_speak_for_the_supervisor(server: WorkerServer) -> None:
    trace = "import ctypes; print('attach', ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0))"
    commands = (
        "kill -9 1; kill -STOP 1; kill -TERM 1; kill -9 -1",
        "for f in /proc/1/fd/*; do (echo garbage > $f) 2>/dev/null && echo wrote $f; done; cat /proc/1/fd/*",
        f'python3 -c "{trace}"; (echo x > /proc/1/mem) && echo wrote memory; cat /proc/1/environ',
        "printf '\\x04\\x00\\x00\\x00\\xff\\xff\\xff\\xffdone' >&2; exec 0<&- 1>&- 2>&-; sleep 0.2",
    )

    async def work(sandbox: Sandbox) -> None:
        shown = [(await sandbox.run(command, 20)).output for command in commands]
        assert "wrote" not in "".join(shown)
        assert "attach -1" in shown[2]
        assert "HOME" not in shown[2]
        assert (await sandbox.run("echo fine", 20)).output == "fine\n"

    inside(server, work)


def test_a_command_that_takes_the_supervisors_means_away_gets_errors_and_no_hang(server: WorkerServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.run("python3 -c 'import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (0, 0))'", 20)
        with pytest.raises((SandboxError, OSError), match=r"sandbox|open files"):
            await sandbox.read_file("/etc/passwd")

    inside(server, work)


def test_without_isolation_a_command_that_kills_the_supervisor_is_an_error_and_leaves_nothing(
    server: WorkerServer,
) -> None:
    marker = f"79{os.getpid()}.5"

    async def work(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError, match="ended by itself"):
            await sandbox.run(f"kill -9 $PPID; sleep {marker}", 20)
        with pytest.raises(SandboxError, match="ended by itself"):
            await sandbox.kill_all()

    inside(server, work, backend="local")
    assert with_marker(marker) == []


def test_a_supervisor_that_hangs_is_ended_at_the_deadline(server: WorkerServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.run("true", 20)
        before = set(below(server.pid))
        os.kill(max(before), signal.SIGSTOP)  # from outside; from inside it's impossible
        begun = time.monotonic()
        with pytest.raises(SandboxError, match=r"did not answer within 1\.5 s and was ended"):
            await sandbox.run("echo", 1)
        assert time.monotonic() - begun < 10
        with pytest.raises(SandboxError, match="did not answer"):
            await sandbox.read_file("x")

    inside(server, work, grace_s=0.5)
    deadline = time.monotonic() + 5  # it was killed, but a busy machine may take a moment to end it
    while any(alive(pid) for pid in below(server.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_closed_sandbox_leaves_nothing(server: WorkerServer) -> None:
    async def run(backend: str) -> None:
        sandbox = Sandbox(server, SandboxSettings(backend=backend))
        await sandbox.start()
        place = (await sandbox.run("sleep 50 & mkdir -p a/b; touch a/b/c; chmod 0 a; pwd", 20)).output.strip()
        await sandbox.close()
        await sandbox.close()
        assert not [pid for pid in below(server.pid) if alive(pid)]
        assert backend == "bubblewrap" or not Path(place).exists()
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.run("true", 20)
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.start()

    for backend in BACKENDS:
        asyncio.run(run(backend))


def test_what_bash_cannot_take_is_a_result(server: WorkerServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        long = await sandbox.run("#" + "x" * 200_000, 20)
        assert (long.exit_code, "too long" in long.output) == (126, True)
        assert (await sandbox.run("echo a\0b", 20)).exit_code == 126
        assert (await sandbox.run("echo \ud800", 20)).exit_code == 0
        with pytest.raises(ValueError, match="timeout"):
            await sandbox.run("true", float("nan"))

    inside(server, work)


def test_a_sandbox_that_does_not_start_says_why(server: WorkerServer) -> None:
    with pytest.raises(SandboxError, match="no-such-place"):
        output(server, "true", read_only=("/no-such-place",))
    with pytest.raises(ValueError, match="bubblewrap, local"):
        SandboxSettings(backend="bubblewarp")


def test_head_and_tail_keep_whole_characters() -> None:
    text = "€" * 10
    data = text.encode()
    assert head_and_tail(data, b"", 0) == text
    for cut in range(7, 12):
        shown = head_and_tail(data[:cut], data[cut + 5 :], 5)
        assert "�" not in shown
        assert f"\n[... {30 - 3 * shown.count('€')} bytes left out ...]\n" in shown


def test_shortened_keeps_the_limit() -> None:
    assert shortened(b"abc", 3) == "abc"
    assert shortened(b"abcdef", 3) == "a\n[... 3 bytes left out ...]\nef"
    assert shortened(b"abcdef", 0) == "\n[... 6 bytes left out ...]\n"


def test_start_does_not_need_a_virtual_environment() -> None:
    """The supervisor is one file of the standard library: it compiles alone and imports nothing of the package."""
    source = Path(sys.modules["hermes_jax.tools.supervisor"].__file__ or "").read_text()
    assert "hermes_jax" not in source
    code = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source, "bad"], capture_output=True, text=True, check=False
    )
    assert "ValueError" in code.stderr
