"""Child of the worker server that runs functions (reward functions, mostly), one after the other.

Started as `python -c ... FD`. Whatever a function does here (endless loop, `sys.exit`, a crash) cannot reach the
trainer: the server ends this process at the function's deadline.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import inspect
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from hermes_jax.tools.frames import receive_blocking, send_blocking

_PR_SET_PDEATHSIG = 1
_KEPT_FUNCTIONS = 16


def digest(pickled: bytes) -> str:
    """Name of a pickled function."""
    return hashlib.sha256(pickled).hexdigest()


def finished(result: Any) -> Any:
    """The result of a call; a coroutine is run to its end."""
    return asyncio.run(_finish(result)) if inspect.isawaitable(result) else result


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def call(function: Callable[..., Any], arguments: bytes) -> bytes:
    """Calls with pickled (args, kwargs), and returns the result as JSON.

    Raises:
        TypeError: the result is no plain data (None, bool, number, str, list, dict).
        Whatever the function raises.
    """
    args, kwargs = pickle.loads(arguments)
    return json.dumps(finished(function(*args, **kwargs))).encode()


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain data."""
    lines = traceback.format_exception(error)
    return {"error": type(error).__name__, "message": str(error)[:2000], "traceback": "".join(lines)[-4000:]}


def serve(sock: socket.socket) -> None:
    """Answers load and call requests until the other end closes."""
    functions: dict[str, Callable[..., Any]] = {}
    while (request := receive_blocking(sock)) is not None:
        fields, payload = request
        answer: dict[str, Any] = {"ok": True}
        result = b""
        try:
            if fields["op"] == "load":
                while len(functions) >= _KEPT_FUNCTIONS:
                    del functions[next(iter(functions))]
                functions[fields["digest"]] = pickle.loads(payload)
            else:
                result = call(functions[fields["digest"]], payload)
        except BaseException as error:  # SystemExit, KeyboardInterrupt and MemoryError too: none may end the worker
            answer = describe(error)
        try:
            send_blocking(sock, answer, result)
        except ConnectionError:  # the server is gone, and nobody else wants the answer
            return


def main() -> None:
    """Serves the socket whose descriptor is the first argument."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # also when the server itself is killed
    if os.getppid() == 1:
        return
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    os.dup2(2, 1)  # what a function prints goes to the log
    serve(sock)


if __name__ == "__main__":
    main()
