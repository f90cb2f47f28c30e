"""Putting a folder in its place at once, and what a model folder holds besides weights."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hermes_jax.models.safetensors_io import ModelFolderError

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "LICENSE*",
    "NOTICE*",
)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux


def copy_companions(source: Path, to: Path, dtype: str | None) -> None:
    """Copies config (with another `dtype`, if given), tokenizer, chat template, generation config and licence."""
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, to / path.name)
    if dtype is None:
        shutil.copyfile(source / "config.json", to / "config.json")
        return
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (to / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def replace_folder(target: Path, fill: Callable[[Path], None], *, keep: Path) -> None:
    """Has `fill` write a folder aside, flushes it to the disk and puts it at `target` by one rename.

    What stands at `target` stays until then and is deleted afterwards; a failure leaves it untouched.

    Args:
        target: absent, empty, or an earlier export (a folder with a config.json).
        keep: a folder that must not be replaced.

    Raises:
        ModelFolderError: `target` is something else, or writing failed (disk full, no permission).
    """
    if target.exists() and keep.exists() and target.samefile(keep):
        raise ModelFolderError(f"{target} is the model that the export starts from: choose another folder")
    if target.exists() and not _replaceable(target):
        raise ModelFolderError(f"{target} exists and is no model folder: choose another one, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            made = Path(scratch) / "new"
            made.mkdir()
            fill(made)
            _flush(made)
            _put(made, target)
            _flush_path(target.parent)
    except OSError as error:
        raise ModelFolderError(
            f"could not write {target}: {error}; what stood there is unchanged: free space or correct the path, "
            "then export again"
        ) from error


def _replaceable(target: Path) -> bool:
    return target.is_dir() and ((target / "config.json").is_file() or not any(target.iterdir()))


def _put(made: Path, target: Path) -> None:
    """`made` becomes `target`; an old `target` ends in the scratch folder, which is deleted."""
    if not target.exists():
        os.rename(made, target)
    elif not _exchange(made, target):
        os.rename(target, made.with_name("old"))
        os.rename(made, target)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two paths in one step where the system can (Linux, most file systems): no moment without either."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_AT_FDCWD, bytes(a), _AT_FDCWD, bytes(b), _RENAME_EXCHANGE) == 0


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        _flush_path(path)
    _flush_path(folder)


def _flush_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
