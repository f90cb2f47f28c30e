"""Compiled programs kept on the disk for the next start. For commands: importing the library changes nothing."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

OFF = "off"
LARGEST_BYTES = 2 << 30
"""A folder that holds more loses its oldest programs at the next start."""


def keep_compilations(folder: str | None) -> Path | None:
    """Makes jax read compiled programs from a folder and write new ones into it. Call it before jax compiles.

    Programs are kept apart by jax's version and by the processor, since those for a CPU are machine code: a folder may
    be shared by machines of several kinds. Several processes may use it at once. Nothing that is wrong with the folder
    ends the command; it is said on stderr, and jax compiles anew.

    Args:
        folder: None = `JAX_COMPILATION_CACHE_DIR` if that is set, else one in the user's cache folder; "off" = none.

    Returns:
        Where the programs of this machine are; None if none are kept.
    """
    import jax

    if folder == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    users: str | None = jax.config.values["jax_compilation_cache_dir"]
    if folder is None and users:
        _say_what_is_wrong(Path(users))
        return Path(users)
    place = (default_folder() if folder is None else Path(folder)).expanduser().absolute() / _machine()
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)  # machine code of others must not get in
        with tempfile.TemporaryFile(dir=place):
            pass
        _make_room(place, LARGEST_BYTES)
    except OSError as error:
        print(
            f"warning: compiled programs can't be kept in {place} ({error.strerror}): every start compiles them anew; "
            f"set compilation_cache to another folder, or to {OFF}",
            file=sys.stderr,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # the many small ones cost most of a start
    _say_what_is_wrong(place)
    return place


def default_folder() -> Path:
    """`hermes-jax/compiled` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hermes-jax" / "compiled"


def _machine() -> str:
    """Name for this version of jax on this kind of processor; the number of cores decides how loops are divided."""
    import jax
    import jaxlib

    parts = [jax.__version__, jaxlib.__version__, platform.machine(), str(_cores()), *_cpu_features()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_features() -> list[str]:
    """Model and instruction sets of the CPU, where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    wanted = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.startswith(wanted)})


def _make_room(place: Path, most: int) -> None:
    """Removes the programs written first until the rest fits."""
    files = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in place.iterdir() if file.is_file())
    total = sum(size for _, size, _ in files)
    for _, size, file in files:
        if total <= most:
            break
        file.unlink(missing_ok=True)
        total -= size


def _say_what_is_wrong(place: Path) -> None:
    """Says jax's warnings about the folder in one line each, and removes programs that were written by halves."""
    show = warnings.showwarning

    def showwarning(message: Warning | str, category: Any, *where: Any, **more: Any) -> None:
        text = str(message)
        if "persistent compilation cache entry" not in text:
            return show(message, category, *where, **more)
        removed = _remove_broken(place) if text.startswith("Error reading") else 0
        remedy = "removed the broken file" if removed else f"if this stays, remove {place}"
        print(f"warning: {text.splitlines()[0]}; compiled anew ({remedy})", file=sys.stderr)

    warnings.showwarning = showwarning


def _remove_broken(place: Path) -> int:
    """Removes files that end too early, as a writer that was killed leaves them: jax would never replace them."""
    broken = [file for file in place.glob("*-cache") if not _is_whole(file)]
    for file in broken:
        file.unlink(missing_ok=True)
    return len(broken)


def _is_whole(file: Path) -> bool:
    data = file.read_bytes() if file.exists() else b""
    try:
        if data.startswith(b"\x28\xb5\x2f\xfd"):  # zstandard, which jax uses where it is installed
            import zstandard

            zstandard.ZstdDecompressor().decompress(data)
        else:
            zlib.decompress(data)
    except Exception:  # each library has errors of its own for what it can't read
        return False
    return True
