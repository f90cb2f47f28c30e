"""Every episode of a run on disk, and back: one gzipped JSONL file per step."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ARRAYS = {
    "tokens": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "temperature": np.float32,
    "policy_version": np.int32,
    "turn": np.int32,
}
"""Arrays of a trajectory, one value per token."""

_FILE = re.compile(r"^(?P<kind>[a-z_]+)_(?P<step>\d+)\.jsonl\.gz$")


class SavedTrajectory(Protocol):
    """What is saved of a token sequence: the arrays of `ARRAYS`."""

    @property
    def tokens(self) -> Any: ...


class SavedEpisode(Protocol):
    """What is saved of an episode."""

    task_id: Any
    member: Any
    trajectories: Any
    outcome: Any
    reward: Any
    reward_parts: Any
    turn_rewards: Any
    success: Any
    messages: Any
    timings: Any
    counters: Any
    error: Any


class EpisodeLog:
    """Writes the episodes of a run.

    Args:
        folder: made if it is missing.
        resume_after: training step of the checkpoint from which a run goes on: files of later steps are removed.
    """

    def __init__(self, folder: str | Path, *, resume_after: int | None = None) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        if resume_after is not None:
            for path, _, step in _files(self._folder):
                if step > resume_after:
                    path.unlink()

    def write(
        self, step: int, episodes: Sequence[Any], *, kind: str = "train", advantages: Sequence[float] | None = None
    ) -> Path:
        """Saves the episodes of one step; a file of the same step and kind is replaced.

        Args:
            step: training step.
            episodes: with the attributes of `SavedEpisode`.
            kind: letters and `_`: "train", "eval_sampled", "eval_greedy", ...
            advantages: of each episode, where there are any.

        Returns:
            The file. It appears whole or not at all.
        """
        name = f"{kind}_{step:06d}.jsonl.gz"
        path = self._folder / name
        if not _FILE.match(name):
            raise ValueError(f"kind {kind!r} must be of small letters and '_', step {step} not negative")
        aside = path.with_suffix(".tmp")
        with open(aside, "wb") as raw:
            with gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0, compresslevel=5) as file:
                for number, episode in enumerate(episodes):
                    advantage = None if advantages is None else float(advantages[number])
                    row = {"step": step, "kind": kind, "advantage": advantage, **_row(episode)}
                    file.write(json.dumps(row, default=str).encode() + b"\n")
            raw.flush()
            os.fsync(raw.fileno())
        aside.replace(path)
        return path


def load_episodes(run: str | Path, *, step: int | None = None, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The saved episodes of a run in the order of their steps.

    Args:
        run: a run folder, or its folder of episodes.
        step, kind: only these.

    Yields:
        A dict per episode: step, kind, advantage, task_id, member, outcome, reward, reward_parts, turn_rewards,
        success, messages, timings, counters, error, and trajectories as dicts of numpy arrays (the arguments of a
        `Trajectory`).

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = Path(run) / "episodes" if (Path(run) / "episodes").is_dir() else Path(run)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{run} holds no episodes: give a run folder that was trained with logging.save_episodes"
        )
    for path, file_kind, file_step in _files(folder):
        if step in (None, file_step) and kind in (None, file_kind):
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for line in file:
                    row = json.loads(line)
                    row["trajectories"] = [_arrays(trajectory) for trajectory in row["trajectories"]]
                    yield row


def _files(folder: Path) -> list[tuple[Path, str, int]]:
    matches = ((path, _FILE.match(path.name)) for path in folder.iterdir())
    found = [(path, match["kind"], int(match["step"])) for path, match in matches if match]
    return sorted(found, key=lambda file: (file[2], file[1]))


def _row(episode: SavedEpisode) -> dict[str, Any]:
    return {
        "task_id": episode.task_id,
        "member": episode.member,
        "outcome": str(episode.outcome),
        "reward": episode.reward,
        "reward_parts": dict(episode.reward_parts),
        "turn_rewards": list(episode.turn_rewards),
        "success": episode.success,
        "counters": dict(episode.counters),
        "timings": dict(episode.timings),
        "error": episode.error,
        "messages": [dict(message) for message in episode.messages],
        "trajectories": [_lists(trajectory) for trajectory in episode.trajectories],
    }


def _lists(trajectory: SavedTrajectory) -> dict[str, list[Any]]:
    return {name: _list(np.asarray(getattr(trajectory, name), dtype)) for name, dtype in ARRAYS.items()}


def _list(array: np.ndarray) -> list[Any]:
    """Numbers that come back bitwise: nine digits hold a float32."""
    if array.dtype == np.float32:
        return [float(f"{value:.9g}") for value in array.tolist()]
    return array.astype(np.int32).tolist()


def _arrays(trajectory: Mapping[str, list[Any]]) -> dict[str, np.ndarray]:
    return {name: np.asarray(trajectory[name], dtype) for name, dtype in ARRAYS.items()}
