"""How the C library gives memory to this process: kept and used again, instead of mapped anew for every array."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # options of glibc's mallopt(3)
_NEVER = -1


def reuse_freed_memory() -> bool:
    """Makes glibc keep freed memory for the next allocation. Call it before threads start.

    On a CPU, XLA allocates the temporary arrays of every step anew. By default glibc maps large ones from the system
    and gives them back, so that each step pays for tens of thousands of page faults.

    Returns:
        Whether it had an effect; elsewhere than with glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(*option) == 1 for option in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER)))
