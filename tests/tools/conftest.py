"""One worker server for the module, and a way to run coroutines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hermes_jax.tools.worker import WorkerServer


@pytest.fixture(scope="module")
def server() -> Iterator[WorkerServer]:
    with WorkerServer(max_calls=8) as server:
        yield server
