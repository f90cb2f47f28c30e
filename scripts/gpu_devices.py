"""What jax runs on, and whether all is there that `gpu_sections.py` imports; started by `gpu_check.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def devices() -> dict[str, Any]:
    """Platform, kind, number and memory of the devices, and versions; or an `error`, with the `missing` package."""
    try:
        import flax
        import gpu_sections  # noqa: F401  (imports what the sections need)
        import jax
        import jaxlib
        import numpy as np
        import optax
    except ImportError as error:
        return {"missing": error.name, "error": f"{sys.executable} can't run the check: {error}"}
    try:
        found = jax.devices()
    except RuntimeError as error:  # a platform that was asked for does not start
        return {"error": f"jax finds no device: {error}"}
    versions = {module.__name__: module.__version__ for module in (jax, jaxlib, flax, optax, np)}
    return {
        "platform": found[0].platform,
        "kind": found[0].device_kind,
        "count": len(found),
        "memory_bytes": (found[0].memory_stats() or {}).get("bytes_limit"),
        "versions": {"python": sys.version.split()[0], **versions},
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps({"devices": devices()}), encoding="utf-8")
