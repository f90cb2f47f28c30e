"""The checkpoints of a run: those of its warm start and those of its training."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import jax

from hermes_jax.config import Config
from hermes_jax.learner import manifest
from hermes_jax.learner.checkpoint import Checkpoints, Restored
from hermes_jax.run_folder import RunFolder

WARM_START, TRAIN = "warm_start", "train"
NAMES = {WARM_START: "warm-start step", TRAIN: "step"}


class Saving:
    """Saves and restores a run; one writer per run folder.

    All but `how_to_go_on` and `part_to_resume` belong on the device thread.

    Args:
        config, run: of the run.
    """

    def __init__(self, config: Config, run: RunFolder) -> None:
        self.config, self.run = config, run
        options = config.checkpoint
        kept, later = options.keep_last, options.asynchronous
        best = options.keep_best
        self._of = {
            WARM_START: Checkpoints(run.warm_checkpoints, keep_last=kept, asynchronous=later, copies=False),
            TRAIN: Checkpoints(run.checkpoints, keep_last=kept, keep_best=best, asynchronous=later, copies=False),
        }

    def part_to_resume(self) -> str:
        """The part of the run in which it stands."""
        warm = self.config.warm_start.steps > 0 and not self.run.start.exists()
        return WARM_START if warm else TRAIN

    def latest_step(self, part: str) -> int | None:
        """The newest step that is whole."""
        return self._of[part].latest_step()

    def problems(self, part: str) -> tuple[str, ...]:
        """What is wrong with newer ones."""
        return self._of[part].report()

    def restore(self, part: str, abstract_state: Any, step: int) -> Restored:
        """Reads a checkpoint and forgets all newer ones."""
        restored = self._of[part].restore(abstract_state, step)
        self._of[part].discard_after(step)
        return restored

    def is_due(self, step: int, total: int) -> bool:
        """Whether the config wants a checkpoint of this step."""
        every = self.config.checkpoint.every_steps
        return step == total or bool(every and step % every == 0)

    def save(self, part: str, step: int, state: Any, host: Mapping[str, Any], metric: float | None = None) -> None:
        """Begins to save. Before the next update takes over the arrays, call `wait_for_arrays`."""
        self._of[part].save(step, state, host, metric=metric)

    def save_last(self, part: str, step: int, state: Any, host: Mapping[str, Any]) -> None:
        """Saves the state in which a run ends early, unless it is there already; returns when it is on the disk."""
        self.wait()
        if self.latest_step(part) != step and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            self.save(part, step, state, host)
        self.wait()

    def wait_for_arrays(self) -> None:
        """Waits until the arrays that were saved last may be donated.

        A copy of them would take the memory of a second state. In a step there is a whole collection between the save
        and this.
        """
        for checkpoints in self._of.values():
            checkpoints.wait_for_arrays()

    def wait(self) -> None:
        """Waits until all is on the disk."""
        for checkpoints in self._of.values():
            checkpoints.wait()

    def close(self) -> None:
        """Waits and lets go of the folders."""
        for checkpoints in self._of.values():
            checkpoints.close()

    def how_to_go_on(self) -> str:
        """Names the newest checkpoint and the command that resumes from it. Only looks at names: works at any time."""
        for part in (TRAIN, WARM_START):
            if steps := manifest.steps(self._of[part].directory):
                return f"saved at {NAMES[part]} {steps[-1]}. Go on with: {self._command()}"
        return f"nothing is saved yet. Start again with: {self._command()}"

    def _command(self) -> str:
        return f"{_python()} -m hermes_jax.train --resume {self.run.root}"


def _python() -> str:
    """This interpreter, as short as it can be typed from here."""
    here = os.path.relpath(sys.executable)
    return here if not here.startswith("..") else sys.executable
