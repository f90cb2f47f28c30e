"""How often, and for how long, jax compiled: after warm-up it should not."""

from __future__ import annotations

import threading
from types import TracebackType

from jax import monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts compilations of this process while it is open; use it as a context manager, or `start` and `stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._seconds = 0.0
        self._taken = (0, 0.0)

    @property
    def count(self) -> int:
        """Compilations so far."""
        return self._count

    @property
    def seconds(self) -> float:
        """Time they took (s)."""
        return self._seconds

    def take(self) -> tuple[int, float]:
        """Compilations and their seconds since the last call."""
        with self._lock:
            new = self._count - self._taken[0], self._seconds - self._taken[1]
            self._taken = self._count, self._seconds
        return new

    def start(self) -> Compilations:
        """Begins to count."""
        monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def stop(self) -> None:
        """Stops counting."""
        monitoring.unregister_event_duration_listener(self._listen)

    def __enter__(self) -> Compilations:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        if event == _EVENT:
            with self._lock:
                self._count += 1
                self._seconds += duration_secs
