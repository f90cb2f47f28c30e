"""Where a run keeps its files, and the rule that a used folder is never overwritten by accident."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


class RunFolderError(RuntimeError):
    """The run folder can't be used as asked; the message says what to do."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config; its presence marks the folder as used."""
        return self.root / "config.yaml"

    @property
    def policy(self) -> Path:
        """HF folder of a policy that was made on the spot."""
        return self.root / "policy"

    @property
    def start(self) -> Path:
        """HF folder of the policy at the first GRPO step: the reference of the KL, and 'before' in the report."""
        return self.root / "start"

    @property
    def final(self) -> Path:
        """HF folder of the trained policy."""
        return self.root / "final"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def warm_checkpoints(self) -> Path:
        return self.root / "warm_start"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def episodes(self) -> Path:
        return self.root / "episodes"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def report(self) -> Path:
        """Success before and after, as JSON."""
        return self.root / "report.json"


def open_run_folder(root: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """The run folder, empty or ready to resume.

    Raises:
        RunFolderError: used and neither flag given, both flags given, or nothing to resume.
    """
    folder = RunFolder(root)
    if resume and overwrite:
        raise RunFolderError("--resume and --overwrite contradict each other; give one of them")
    used = folder.config.exists()
    if resume and not used:
        raise RunFolderError(f"nothing to resume: {root} holds no run (no config.yaml); start it without --resume")
    if used and not (resume or overwrite):
        raise RunFolderError(
            f"{root} already holds a run; go on with it by --resume, replace it by --overwrite, "
            "or choose another folder by run_dir=..."
        )
    if not used and root.exists() and any(root.iterdir()):
        raise RunFolderError(f"{root} is not empty and holds no run; choose another folder by run_dir=...")
    if used and overwrite:
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    return folder
