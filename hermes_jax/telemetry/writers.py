"""Where metrics go: a JSONL file, TensorBoard, Weights & Biases; all through one log that knows every name."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hermes_jax.telemetry.event_file import EventFile
from hermes_jax.telemetry.metrics import describe

PHASES = ("warm_start", "train")
"""Parts of a run in their order; each counts its own steps."""


class Writer(Protocol):
    """Receives the metrics of a step."""

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Checks the names and hands the numbers to every writer.

    Args:
        writers: closed with the log.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)

    def log(self, step: int, values: Mapping[str, Any], *, phase: str = "train") -> dict[str, float]:
        """Writes numbers of one step; a step may be written in several calls.

        Args:
            step: number of the step in its phase.
            values: name -> anything that `float` accepts; None is left out.
            phase: one of `PHASES`.

        Returns:
            The numbers as floats.

        Raises:
            UnknownMetricError: a name is not documented.
        """
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}; use one of {', '.join(PHASES)}")
        for name in values:
            describe(name)
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        for writer in self._writers:
            writer.write(phase, step, numbers)
        return numbers

    def close(self) -> None:
        """Closes every writer, also when one of them fails."""
        errors = []
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class JsonlWriter:
    """One JSON object per call and line: `{"phase", "step", name: number}`; NaN and infinities are null.

    Args:
        path: appended to.
        resume_after: (phase, step) of the checkpoint from which a run goes on: rows after it are removed, as is a
            last line that was cut off. None = keep all.
    """

    def __init__(self, path: str | Path, *, resume_after: tuple[str, int] | None = None) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if resume_after is not None and self._path.exists():
            self._cut(resume_after)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Appends a row; it has left the process when this returns."""
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"phase": phase, "step": step} | numbers) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _cut(self, last: tuple[str, int]) -> None:
        phase, step = last
        end = PHASES.index(phase), step
        kept = [row for row in read_metrics(self._path) if (PHASES.index(row["phase"]), row["step"]) <= end]
        aside = self._path.with_name(self._path.name + ".tmp")
        with open(aside, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a metrics file, in order; a last line that was cut off is left out.

    Raises:
        ValueError: another line is no JSON; the message names it.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: no JSON ({error}); remove the line") from error


class TensorBoardWriter:
    """Scalars for TensorBoard, a folder per phase.

    Args:
        folder: of the run; events go to `folder/<phase>`.
        resume_after: as in `JsonlWriter`; TensorBoard hides what was written after it.
    """

    def __init__(self, folder: str | Path, *, resume_after: tuple[str, int] | None = None) -> None:
        self._folder = Path(folder)
        self._resume_after = resume_after
        self._files: dict[str, EventFile] = {}

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Adds one point per metric."""
        self._file(phase).add_scalars(step, values)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, phase: str) -> EventFile:
        if phase not in self._files:
            resumed = self._resume_after is not None and self._resume_after[0] == phase
            purge = self._resume_after[1] + 1 if resumed and self._resume_after else None
            self._files[phase] = EventFile(self._folder / phase, purge_step=purge)
        return self._files[phase]


class WandbWriter:
    """Metrics on Weights & Biases; needs the extra `wandb`.

    Args:
        project, name: where they appear; `name` also identifies a run that goes on.
        folder: for wandb's own files.
        config: shown beside the run.

    Raises:
        RuntimeError: wandb is not installed.
    """

    def __init__(self, *, project: str, name: str, folder: str | Path, config: Mapping[str, Any]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise RuntimeError(
                "logging.wandb is true but wandb is not installed: pip install 'hermes-jax[wandb]', "
                "or set logging.wandb to false"
            ) from error
        self._run = wandb.init(
            project=project, name=name, id=name.replace("/", "-"), dir=str(folder), config=dict(config), resume="allow"
        )
        for phase in PHASES:
            self._run.define_metric(f"{phase}_step", hidden=True)
        self._run.define_metric("warm_start/*", step_metric="warm_start_step")
        self._run.define_metric("*", step_metric="train_step")

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Sends one row; its own axis is `<phase>_step`."""
        self._run.log({**values, f"{phase}_step": step})

    def close(self) -> None:
        self._run.finish()
