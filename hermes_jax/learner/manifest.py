"""Is a saved step whole? Each holds a list of its files with sizes and checksums, written before it gets its name."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "manifest.json"
_WRITTEN_LATER = "_CHECKPOINT_METADATA"  # Orbax adds the time of the commit to it while it renames the folder
_UNFINISHED = re.compile(r"^(\d+)\.orbax-checkpoint-tmp.*")


@dataclass(frozen=True)
class Manifest:
    """What a saved step holds.

    Args:
        step: training step.
        metric: value by which checkpoints are ranked, None = not evaluated at this step.
        leaves: name of each array -> (shape, dtype).
        files: path inside the step's folder -> (bytes, CRC-32).
    """

    step: int
    metric: float | None
    leaves: Mapping[str, tuple[tuple[int, ...], str]]
    files: Mapping[str, tuple[int, int]]


def write(folder: Path, step: int, metric: float | None, leaves: Mapping[str, Any]) -> None:
    """Lists the files in `folder` and writes the manifest beside them, flushed to the disk."""
    files = {name: (path.stat().st_size, _checksum(path)) for name, path in _files(folder)}
    body = {
        "step": step,
        "metric": metric,
        "leaves": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves.items()},
        "files": files,
    }
    with open(folder / NAME, "w", encoding="utf-8") as file:
        json.dump(body, file)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """Reads the manifest of a step.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    try:
        body = json.loads((folder / NAME).read_text(encoding="utf-8"))
        leaves = {name: (tuple(shape), dtype) for name, (shape, dtype) in body["leaves"].items()}
        files = {name: (size, checksum) for name, (size, checksum) in body["files"].items()}
        return Manifest(body["step"], body["metric"], leaves, files)
    except FileNotFoundError:
        raise ValueError(f"{NAME} is missing") from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{NAME} is damaged: {error}") from error


def problem(folder: Path, *, checksums: bool = True) -> str | None:
    """Why the step in `folder` is not whole, or None if it is.

    Args:
        folder: the step's folder.
        checksums: read every byte; False compares sizes only.
    """
    try:
        manifest = read(folder)
    except ValueError as error:
        return str(error)
    for name, (size, checksum) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
        if checksums and _checksum(path) != checksum:
            return f"{name} has other bytes than were written"
    return None


def steps(directory: Path) -> list[int]:
    """Steps that have a folder, whole or not, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def unfinished(directory: Path) -> dict[Path, int]:
    """Folders of steps whose writer stopped before they were whole -> step."""
    if not directory.is_dir():
        return {}
    matches = ((path, _UNFINISHED.match(path.name)) for path in directory.iterdir())
    return {path: int(match[1]) for path, match in matches if match}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (NAME, _WRITTEN_LATER):
            yield path.relative_to(folder).as_posix(), path


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value
