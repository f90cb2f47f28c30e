"""What a run says about itself: documented metrics, saved episodes, progress.

`lag`, `compilations` and `flops` are modules of their own: the last two import jax.
"""

from hermes_jax.telemetry.episodes import EpisodeLog, load_episodes
from hermes_jax.telemetry.metrics import METRICS, Metric, UnknownMetricError, describe, of_update
from hermes_jax.telemetry.progress import Progress
from hermes_jax.telemetry.writers import JsonlWriter, MetricsLog, TensorBoardWriter, WandbWriter, Writer, read_metrics

__all__ = [
    "METRICS",
    "EpisodeLog",
    "JsonlWriter",
    "Metric",
    "MetricsLog",
    "Progress",
    "TensorBoardWriter",
    "UnknownMetricError",
    "WandbWriter",
    "Writer",
    "describe",
    "load_episodes",
    "of_update",
    "read_metrics",
]
