"""Everything a run writes down and shows: metrics, episodes, progress, speeds."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hermes_jax.assembly import Policy, compute_dtype
from hermes_jax.config import Config
from hermes_jax.data.trajectory import Group
from hermes_jax.engines.jax_engine import EngineMetrics
from hermes_jax.run_folder import RunFolder
from hermes_jax.telemetry.compilations import Compilations
from hermes_jax.telemetry.episodes import EpisodeLog
from hermes_jax.telemetry.flops import TransformerShape, measure_peak, mfu, train_flops
from hermes_jax.telemetry.lag import LoopLag
from hermes_jax.telemetry.progress import Progress
from hermes_jax.telemetry.stopwatch import Stopwatch
from hermes_jax.telemetry.writers import JsonlWriter, MetricsLog, TensorBoardWriter, WandbWriter, Writer


class RunLog:
    """The telemetry of a run.

    Args:
        config, run: of the run.
        resume_after: (phase, step) of the checkpoint from which it goes on, -1 if it has none; later rows are removed.
            None = a new run.
    """

    def __init__(self, config: Config, run: RunFolder, resume_after: tuple[str, int] | None) -> None:
        self.config = config
        writers: list[Writer] = [JsonlWriter(run.metrics, resume_after=resume_after)]
        if config.logging.tensorboard:
            writers.append(TensorBoardWriter(run.tensorboard, resume_after=resume_after))
        if config.logging.wandb:
            name = config.logging.wandb_name or run.root.name
            project = config.logging.wandb_project
            writers.append(WandbWriter(project=project, name=name, folder=run.root, config=config.model_dump()))
        self.metrics = MetricsLog(writers)
        after = resume_after[1] if resume_after and resume_after[0] == "train" else -1
        self.episodes = EpisodeLog(run.episodes, resume_after=None if resume_after is None else after)
        self.progress = Progress(config.logging.progress)
        self.lag, self.compilations = LoopLag(), Compilations()
        self._peak: float | None = None
        self._shown: dict[str, float] = {}

    def start(self) -> None:
        """Begins to measure, on the running event loop."""
        self.lag.start()
        self.compilations.start()

    def write(self, step: int, values: Mapping[str, Any], *, phase: str = "train") -> None:
        """Writes a row and keeps it for `show`; a step may have several."""
        self._shown |= self.metrics.log(step, values, phase=phase)

    def begin(self, part: str, total: int, step: int) -> None:
        """Shows that a part of the run begins, with `step` of its `total` steps done; what was before is not shown."""
        self.progress.start(part, total, step)
        self._shown = {}

    def show(self, step: int) -> None:
        """Shows what was written since the last call."""
        self.progress.update(step, self._shown)
        self._shown = {}

    def speeds(
        self,
        values: Mapping[str, float | None],
        seconds: Stopwatch,
        policy: Policy,
        played: Sequence[Group],
        trained_on: Sequence[Group],
        passes: int,
    ) -> dict[str, float | None]:
        """Rates of a step, from its seconds by phase, idle times, and the state of the machine."""
        taken = seconds.taken
        sampled = sum(e.counters.get("sampled_tokens", 0) for group in played for e in group.episodes)
        update_s = taken.get("update")
        trained = (values.get("batch/tokens") or 0) * passes
        compilations, compile_s = self.compilations.take()
        return {
            "speed/generated_tokens_per_s": sampled / taken["collect"],
            "speed/trained_tokens_per_s": trained / update_s if update_s else None,
            "speed/mfu": self._mfu(policy, trained_on, passes, update_s) if update_s else None,
            **{f"seconds/{phase}": value for phase, value in taken.items()},
            **seconds.idle_metrics(),
            "system/compilations": compilations,
            "system/compile_s": compile_s,
            "system/host_memory": _resident_bytes(),
            "system/device_memory_peak": _device_peak_bytes(),
            "loop_lag_s": self.lag.take(),
        }

    def engine_counters(self, before: EngineMetrics, after: EngineMetrics) -> dict[str, float]:
        """What the engine counted in between."""
        old = asdict(before)
        return {f"engine/{name}": value - old[name] for name, value in asdict(after).items()}

    def close(self) -> None:
        """Ends the display and closes the files."""
        self.progress.close()
        self.lag.stop()
        self.compilations.stop()
        self.metrics.close()

    def measure_peak(self) -> None:
        """Measures the devices' peak for MFU; on the device thread."""
        import jax

        self._peak = measure_peak(compute_dtype(self.config)) * len(jax.devices())

    def _mfu(self, policy: Policy, groups: Sequence[Group], passes: int, seconds: float) -> float | None:
        if self._peak is None:
            return None
        lengths = [len(t) for group in groups for e in group.episodes for t in e.trajectories]
        return mfu(train_flops(_shape(policy), lengths) * passes, seconds, self._peak)


def _shape(policy: Policy) -> TransformerShape:
    config = policy.config
    return TransformerShape(
        layers=config.n_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
    )


def _resident_bytes() -> float:
    """Largest resident memory of this process so far."""
    scale = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)


def _device_peak_bytes() -> float | None:
    """Largest memory in use on any device so far; None where the backend does not count."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return float(max(peaks)) if peaks else None
