"""Errors that a user can cause: their message says all that is needed, a traceback would only hide it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hermes_jax.config import ConfigError
from hermes_jax.engines.base import EngineError
from hermes_jax.episode_failures import NothingPlayed
from hermes_jax.learner.checkpoint import CheckpointError
from hermes_jax.learning import TooManySkipped
from hermes_jax.models import ModelFolderError, UnsupportedModelError
from hermes_jax.objectives import LossError
from hermes_jax.rollout.template import TemplateError
from hermes_jax.run_folder import RunFolderError
from hermes_jax.tools.backends import BackendUnavailable
from hermes_jax.tools.worker import WorkerServerDied

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


class DiskError(RuntimeError):
    """The run folder can't be written."""


@contextmanager
def disk_errors_named(run: Path) -> Iterator[None]:
    """Turns errors of a full or read-only disk into DiskError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise DiskError(
            f"can't write {error.filename or f'a file in {run}'}: {error.strerror}; make room (or the folder writable) "
            "and go on with --resume"
        ) from error


KNOWN_ERRORS = (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    DiskError,
    EngineError,
    LossError,
    ModelFolderError,
    NothingPlayed,
    RunFolderError,
    TemplateError,
    TooManySkipped,
    UnsupportedModelError,
    WorkerServerDied,
)
