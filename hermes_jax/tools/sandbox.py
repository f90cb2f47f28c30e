"""One isolated place per episode, in which its commands run and its files live."""

from __future__ import annotations

import asyncio
import codecs
import math
from dataclasses import asdict, dataclass

from hermes_jax.tools.backends import WORKSPACE, BackendUnavailable, SandboxSettings, check_backend
from hermes_jax.tools.worker import WorkerServer

__all__ = [
    "WORKSPACE",
    "BackendUnavailable",
    "CommandResult",
    "Sandbox",
    "SandboxError",
    "SandboxSettings",
    "check_backend",
    "head_and_tail",
    "shortened",
]

_DAY_S = 86400.0


class SandboxError(RuntimeError):
    """The sandbox itself failed (does not start, was ended, does not answer): no fault of a command in it."""


@dataclass(frozen=True)
class CommandResult:
    """What a command left.

    Args:
        output: standard output and error as they came, invalid UTF-8 replaced; where it was longer than the limit,
            its head and its tail around a marker with the number of bytes left out.
        exit_code: 128 + signal for a process that a signal ended; None if the command was ended from outside.
        timed_out: it ran into its timeout. All processes of the sandbox were killed.
        omitted_bytes: bytes of output that were left out.
        ended: why the sandbox ended the command otherwise: "processes" or "memory" (too many, too much), else "".
    """

    output: str
    exit_code: int | None
    timed_out: bool = False
    omitted_bytes: int = 0
    ended: str = ""


class Sandbox:
    """A sandbox in the worker server. Requests run one after the other.

    `run`, `read_file`, `write_file` and `kill_all` raise SandboxError when the sandbox is not there (any more), and
    WorkerServerDied when the server is not.
    """

    def __init__(self, server: WorkerServer, settings: SandboxSettings | None = None) -> None:
        self._server = server
        self._settings = settings or SandboxSettings()
        self._turn = asyncio.Lock()
        self._number: int | None = None
        self._closed = False

    async def start(self) -> None:
        """Starts the sandbox (some 15 ms).

        Raises:
            SandboxError: it does not start; with what the backend printed.
        """
        if self._closed:
            raise SandboxError("the sandbox was closed before it started")
        if self._number is not None:
            raise SandboxError("a sandbox starts once")
        self._number, answer = self._server.submit("open", settings=asdict(self._settings))
        fields, payload = await answer
        if fields["words"] != "ready":
            raise SandboxError(payload.decode(errors="replace") or f"unexpected answer {fields['words']!r}")

    async def run(self, command: str, timeout_s: float, output_limit_bytes: int = 50_000) -> CommandResult:
        """Runs `bash -c command` in the workspace, without standard input, and waits for it.

        Processes that it leaves in the background live on until `kill_all`. At the timeout every process of the
        sandbox is killed; so it is when this coroutine is cancelled.

        Args:
            timeout_s: in (0, 86400].
            output_limit_bytes: so much of the output is kept, half of it from the start.
        """
        if not 0 < timeout_s <= _DAY_S or math.isnan(timeout_s):
            raise ValueError(f"a command's timeout must lie in (0, {_DAY_S:g}] s, got {timeout_s}")
        script = command.encode("utf-8", errors="surrogatepass")
        words, payload = await self._ask(f"run {timeout_s:.3f} {output_limit_bytes}", script, timeout_s)
        if words[0] in ("oserror", "failed"):  # too long for an argument, a NUL in it: the model's fault
            return CommandResult(f"bash: {_text(payload)}", 126)
        code, reason, omitted, head = words[1], words[2], int(words[3]), int(words[4])
        return CommandResult(
            output=head_and_tail(payload[:head], payload[head:], omitted),
            exit_code=None if code == "-" else int(code),
            timed_out=reason == "timeout",
            omitted_bytes=omitted,
            ended=reason if reason in ("processes", "memory", "interrupted") else "",
        )

    async def read_file(self, path: str, limit_bytes: int = 1 << 20, *, links: bool = True) -> bytes:
        """Reads a regular file; the path is resolved inside the sandbox, relative to the workspace.

        Args:
            links: false = a link is an error, a symbolic one (ELOOP; folders of the path may be some) and a hard one
                (EMLINK).

        Raises:
            OSError (FileNotFoundError, IsADirectoryError, ... by errno; EFBIG beyond `limit_bytes`).
        """
        words, payload = await self._ask(f"read {limit_bytes} {'links' if links else '-'}", _path(path))
        _raise_for(words, payload, path)
        return payload

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a regular file, its directories too; the path is resolved inside the sandbox.

        Raises:
            OSError, by errno (ENOSPC when the workspace is full).
        """
        words, payload = await self._ask("write", _path(path) + b"\0" + content)
        _raise_for(words, payload, path)

    async def kill_all(self) -> None:
        """Kills every process in the sandbox; files stay. Returns when none is left."""
        words, payload = await self._ask("kill", b"")
        _raise_for(words, payload, "kill")

    async def close(self) -> None:
        """Ends the sandbox with all its processes and files. Can be called again; never raises for a dead sandbox."""
        self._closed = True
        if self._number is not None:
            number, self._number = self._number, None
            _, answer = self._server.submit("end", sandbox=number)
            await asyncio.wait([answer])  # a dead server has ended the sandbox already

    async def _ask(self, words: str, payload: bytes, seconds: float = 0.0) -> tuple[list[str], bytes]:
        async with self._turn:
            if self._number is None:
                raise SandboxError("the sandbox was closed" if self._closed else "the sandbox was not started")
            number = self._number
            try:
                fields, content = await self._server.request(
                    "ask", payload, sandbox=number, words=words, seconds=seconds
                )
            except asyncio.CancelledError:  # what is under way inside must not go on
                self._server.submit("ask", sandbox=number, words="kill", seconds=0.0)
                raise
        answer: list[str] = fields["words"].split()
        if not answer or answer[0] == "lost":
            raise SandboxError(_text(content))
        return answer, content


def head_and_tail(head: bytes, tail: bytes, omitted: int) -> str:
    """Text of an output whose middle was left out, with a marker in its place; invalid UTF-8 is replaced."""
    if not omitted:
        return _text(head + tail)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    start = decoder.decode(head)
    cut_from_head = len(decoder.getstate()[0])  # the first bytes of a character that the cut went through
    cut_from_tail = next((at for at, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
    omitted += cut_from_head + cut_from_tail
    return f"{start}\n[... {omitted} bytes left out ...]\n{_text(tail[cut_from_tail:])}"


def shortened(content: bytes, limit_bytes: int) -> str:
    """Text of so many bytes at most: all of the content, or its head and its tail as in `head_and_tail`."""
    omitted = len(content) - limit_bytes
    if omitted <= 0:
        return _text(content)
    middle = limit_bytes // 2
    return head_and_tail(content[:middle], content[middle + omitted :], omitted)


def _text(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")


def _path(path: str) -> bytes:
    if not path or "\0" in path:
        raise FileNotFoundError(2, "not a path", path)
    return path.encode("utf-8", errors="surrogateescape")


def _raise_for(words: list[str], payload: bytes, path: str) -> None:
    if words[0] == "oserror":
        raise OSError(int(words[1]), _text(payload), path)
    if words[0] == "failed":
        raise SandboxError(_text(payload))
