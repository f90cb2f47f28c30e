"""Where a run keeps its files, and the rule that a used folder is never overwritten by accident."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

MARK = "# Resolved configuration"
"""A run's config begins with it: another file of that name marks no run, and nothing beside it is ever removed."""


class RunFolderError(RuntimeError):
    """The run folder can't be used as asked; the message says what to do."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
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

    @property
    def is_used(self) -> bool:
        """Whether it holds a run."""
        return self.config.is_file() and self.config.read_text(encoding="utf-8", errors="replace").startswith(MARK)

    def begin(self, config: str, *, resume: bool) -> None:
        """Marks the folder as used by this config; what another run left in it is removed unless it goes on."""
        self.root.mkdir(parents=True, exist_ok=True)
        for old in () if resume else list(self.root.iterdir()):
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            elif old != self.config:  # the last to go, so that a half-removed run still counts as one
                old.unlink()
        aside = self.config.with_suffix(".tmp")
        aside.write_text(config, encoding="utf-8")
        aside.replace(self.config)


def open_run_folder(root: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """The run folder, if it may be used as asked. Nothing is written or removed before `RunFolder.begin`.

    Raises:
        RunFolderError: used and neither flag given, both flags given, or nothing to resume.
    """
    folder = RunFolder(root)
    if resume and overwrite:
        raise RunFolderError("--resume and --overwrite contradict each other; give one of them")
    used = folder.is_used
    if resume and not used:
        raise RunFolderError(f"nothing to resume: {root} holds no run (no config.yaml); start it without --resume")
    if used and not (resume or overwrite):
        raise RunFolderError(
            f"{root} already holds a run; go on with it by --resume, replace it by --overwrite, "
            "or choose another folder by run_dir=..."
        )
    if root.exists() and not root.is_dir():
        raise RunFolderError(f"{root} is a file; choose another folder by run_dir=...")
    if not used and root.exists() and any(root.iterdir()):
        raise RunFolderError(f"{root} is not empty and holds no run; choose another folder by run_dir=...")
    return folder
