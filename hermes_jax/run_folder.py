"""Where a run keeps its files, and the rule that a used folder is never overwritten by accident."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

MARK = "# Resolved configuration"
"""A run's config begins with it: another file of that name marks no run, and nothing beside it is ever removed."""


class RunFolderError(RuntimeError):
    """The run folder can't be used as asked; the message says what to do."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder."""

    root: Path
    _held: list[int] = field(default_factory=list, repr=False, compare=False)

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
    def lock(self) -> Path:
        """Locked by the process that trains here."""
        return self.root / ".lock"

    @property
    def report(self) -> Path:
        """Success before and after, as JSON."""
        return self.root / "report.json"

    @property
    def is_used(self) -> bool:
        """Whether it holds a run."""
        return self.config.is_file() and self.config.read_text(encoding="utf-8", errors="replace").startswith(MARK)

    def begin(self, config: str, *, resume: bool) -> None:
        """Takes the folder and marks it as used by this config; what an earlier run left goes, unless it is resumed.

        Raises:
            RunFolderError: a process that still runs has taken it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._take()
        for old in () if resume else list(self.root.iterdir()):
            if old == self.lock:
                continue
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            elif old != self.config:  # the last to go, so that a half-removed run still counts as one
                old.unlink()
        aside = self.config.with_suffix(".tmp")
        aside.write_text(config, encoding="utf-8")
        aside.replace(self.config)

    def release(self) -> None:
        """Lets other processes take the folder; the end of this one does the same."""
        while self._held:
            os.close(self._held.pop())

    def _take(self) -> None:
        """Locks the folder for this process: two trainers in one folder would mix their checkpoints."""
        if self._held:
            return
        held = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(held)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunFolderError(
                    f"{self.lock} can't be locked ({error}): choose a folder on a local disk"
                ) from error
            raise RunFolderError(
                f"another process is training in {self.root}; wait for its end or stop it, or choose another folder by "
                "run_dir=..."
            ) from None
        self._held.append(held)


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
    if not used and root.exists() and any(path != folder.lock for path in root.iterdir()):
        raise RunFolderError(f"{root} is not empty and holds no run; choose another folder by run_dir=...")
    return folder
