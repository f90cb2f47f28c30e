"""What tools and rewards of one episode share: its sandbox, started when first needed and always cleaned up."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from hermes_jax.clock import Clock, RealClock
from hermes_jax.tools.sandbox import CommandResult, Sandbox, SandboxError, SandboxSettings
from hermes_jax.tools.worker import WorkerServer, WorkerServerDied

_log = logging.getLogger(__name__)


class ToolContext:
    """One episode's own sandbox and helpers around it; tools and rewards get the same one.

    No method blocks the event loop. Those that use the sandbox raise SandboxError when it does not start or is lost.

    Attributes:
        terminal_timeout_s: longest time a command may run.
        output_limit_bytes: so much of a command's output, or of a file, is shown to the model.
        state: for tools that remember something within the episode.
        sandbox_start_s: seconds that the start of the sandbox took; 0 without one.
    """

    def __init__(
        self,
        server: WorkerServer,
        settings: SandboxSettings,
        *,
        terminal_timeout_s: float = 120.0,
        output_limit_bytes: int = 50_000,
        clock: Clock | None = None,
    ) -> None:
        self.terminal_timeout_s = terminal_timeout_s
        self.output_limit_bytes = output_limit_bytes
        self.state: dict[str, Any] = {}
        self.sandbox_start_s = 0.0
        self._clock = clock or RealClock()
        self._sandbox = Sandbox(server, settings)
        self._started: asyncio.Task[None] | None = None
        self._cleaned: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Whether anything has used the sandbox."""
        return self._started is not None

    async def terminal(self, command: str, timeout_s: float | None = None) -> CommandResult:
        """Runs a shell command in the workspace; `timeout_s` (default and maximum: `terminal_timeout_s`)."""
        limit = self.terminal_timeout_s if timeout_s is None else min(timeout_s, self.terminal_timeout_s)
        sandbox = await self._ready()
        return await sandbox.run(command, limit, self.output_limit_bytes)

    async def read_bytes(self, path: str, limit_bytes: int = 1 << 20, *, links: bool = True) -> bytes:
        """Content of a regular file, which may not be a link if `links` is false.

        Raises:
            OSError (FileNotFoundError, ...; EFBIG if it is longer; ELOOP or EMLINK for a symbolic or hard link).
        """
        return await (await self._ready()).read_file(path, limit_bytes, links=links)

    async def read_file(self, path: str, limit_bytes: int = 1 << 20, *, links: bool = True) -> str:
        """Text of a regular file, invalid UTF-8 replaced. Arguments and errors as in `read_bytes`."""
        return (await self.read_bytes(path, limit_bytes, links=links)).decode("utf-8", errors="replace")

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Writes a file, its directories too. Raises OSError (ENOSPC if the workspace is full, ...)."""
        data = content if isinstance(content, bytes) else content.encode("utf-8", errors="surrogatepass")
        await (await self._ready()).write_file(path, data)

    async def kill_all(self) -> None:
        """Ends all processes of the episode; its files stay. To be called before a reward looks at them."""
        if self.started:
            await (await self._ready()).kill_all()

    async def cleanup(self) -> None:
        """Ends the sandbox. Can be called again, never raises, and is carried to its end even if cancelled."""
        if self._cleaned is None:
            self._cleaned = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._cleaned)

    async def _ready(self) -> Sandbox:
        if self._cleaned is not None:
            raise SandboxError("the sandbox of this episode was cleaned up")
        if self._started is None:
            self._started = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._started)  # one caller's deadline must not break the start for the others
        return self._sandbox

    async def _start(self) -> None:
        begin = self._clock.now()
        await self._sandbox.start()
        self.sandbox_start_s = self._clock.now() - begin

    async def _close(self) -> None:
        try:
            await self._sandbox.close()
        except (SandboxError, WorkerServerDied, OSError):
            _log.exception("a sandbox could not be closed")
        if self._started is not None:
            await asyncio.wait([self._started])
            if not self._started.cancelled():
                self._started.exception()  # its caller has it; nobody else needs a warning about it


def make_context(server: WorkerServer, settings: SandboxSettings | None = None, **options: Any) -> ToolContext:
    """A fresh context for one episode; `options` as in ToolContext."""
    return ToolContext(server, settings or SandboxSettings(), **options)
