"""Reading and writing the safetensors format, tensor by tensor, with numpy only.

A file is 8 bytes (little-endian length of the header), the header (JSON: name -> dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit


class ModelFolderError(RuntimeError):
    """A model folder that can't be read or written: which file or tensor, what is wrong, what to do."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: file, dtype, shape, first byte."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        """A read-only view of the file; pages are read when touched."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=self.shape)


def read_ahead(files: Iterable[Path]) -> None:
    """Lets the system read whole files into its page cache while the first tensors are worked on; returns at once."""
    if hasattr(os, "posix_fadvise"):
        for file in files:
            with open(file, "rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """All tensors of one file, after a check that the file is whole.

    Raises:
        ModelFolderError: half-written or no safetensors file, or a tensor of an unsupported dtype.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise _broken(file, f"it has {size} bytes and no complete header")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: (e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(file, f"its header is unreadable ({error})") from error
    return {name: _stored(file, name, *entry, data_start=8 + length, size=size) for name, entry in entries.items()}


def _stored(
    file: Path, name: str, code: str, shape: tuple[int, ...], begin: int, end: int, *, data_start: int, size: int
) -> StoredTensor:
    if code not in DTYPES:
        raise ModelFolderError(
            f"{file}: tensor {name} has dtype {code}; supported are {', '.join(DTYPES)}: convert the model"
        )
    if data_start + end > size:
        raise _broken(file, f"it ends at byte {size}, tensor {name} at byte {data_start + end}")
    if end - begin != int(np.prod(shape, dtype=np.int64)) * DTYPES[code].itemsize:
        raise _broken(file, f"tensor {name} has {end - begin} bytes, which shape {list(shape)} and {code} contradict")
    return StoredTensor(file, name, DTYPES[code], shape, data_start + begin)


def _broken(file: Path, why: str) -> ModelFolderError:
    return ModelFolderError(f"{file} is half-written or damaged: {why}; copy or download the file again")


def write_file(
    file: Path, layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]], tensors: Iterable[np.ndarray]
) -> None:
    """Writes one file and waits until it is on the disk; holds one tensor at a time.

    Args:
        file: created anew.
        layout: dtype and shape by name.
        tensors: arrays in the order of `layout`.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + n_bytes(dtype, shape)
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "xb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for (name, (dtype, shape)), tensor in zip(layout.items(), tensors, strict=True):
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"tensor {name} is {tensor.dtype}{tensor.shape}, the header says {dtype}{shape}")
            stream.write(np.ascontiguousarray(tensor).view(np.uint8).data if tensor.ndim else tensor.tobytes())
        stream.flush()
        os.fsync(stream.fileno())


def n_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """Size of a tensor in bytes."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
