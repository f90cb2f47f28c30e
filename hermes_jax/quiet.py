"""What libraries print although our own error says it better."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any


def quiet_libraries() -> None:
    """For commands, before jax and transformers are imported.

    No start-up notes of XLA, no advice of transformers to install torch, no tracebacks beside the error of a full disk.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what it then raises
    logging.getLogger("asyncio").addFilter(_is_no_late_write)
    sys.unraisablehook = _without_late_writes


def _is_no_late_write(record: logging.LogRecord) -> bool:
    """Of the many writes that a full disk fails, Orbax raises one and lets go of the others, which asyncio logs."""
    return not (record.exc_info and "OCDBT database" in str(record.exc_info[1]))


def _without_late_writes(what: Any) -> None:
    """When a save fails, Orbax closes its event loop; TensorStore's other writes end later and miss it, one by one."""
    if not (what.exc_type is RuntimeError and str(what.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(what)
