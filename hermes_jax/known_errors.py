"""Errors that a user can cause: their message says all that is needed, a traceback would only hide it."""

from hermes_jax.config import ConfigError
from hermes_jax.engines.base import EngineError
from hermes_jax.learner.checkpoint import CheckpointError
from hermes_jax.learning import TooManySkipped
from hermes_jax.models import ModelFolderError, UnsupportedModelError
from hermes_jax.rollout.template import TemplateError
from hermes_jax.run_folder import RunFolderError
from hermes_jax.tools.backends import BackendUnavailable
from hermes_jax.tools.worker import WorkerServerDied

KNOWN_ERRORS = (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    EngineError,
    ModelFolderError,
    RunFolderError,
    TemplateError,
    TooManySkipped,
    UnsupportedModelError,
    WorkerServerDied,
)
