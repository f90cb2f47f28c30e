"""Waiting for something until a point in time, by a clock that tests can replace."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from hermes_jax.clock import Clock

_GRACE_S = 10.0
"""Real seconds that cancelled work may take to clean up behind itself before it is left alone."""

T = TypeVar("T")


class DeadlinePassed(Exception):
    """The deadline passed before the work was done; the work was cancelled."""


async def before(deadline: float, clock: Clock, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, but only until `clock.now() == deadline` (`math.inf`: for ever).

    Work that is not done by then is cancelled, and its clean-up is waited for. So it is when the caller is cancelled.

    Raises:
        DeadlinePassed: time is up.
        RuntimeError: the work was cancelled by somebody else.
        Whatever the work raises.
    """
    remaining = deadline - clock.now()
    if remaining <= 0:
        work.close()
        raise DeadlinePassed
    task = asyncio.ensure_future(work)
    timers = set() if math.isinf(remaining) else {asyncio.ensure_future(clock.sleep(remaining))}
    try:
        await asyncio.wait({task, *timers}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DeadlinePassed
        if task.cancelled():
            raise RuntimeError("the work was cancelled from inside")
        return task.result()
    finally:
        await _end({task, *timers})


async def _end(tasks: set[asyncio.Future[Any]]) -> None:
    """Cancels what is not done and waits for it, but not for ever."""
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=_GRACE_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen: no warning about an exception that nobody asked for
