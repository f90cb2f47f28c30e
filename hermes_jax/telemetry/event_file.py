"""Scalars in TensorBoard's file format, written without TensorBoard (whose Python writers import torch if they can).

A file is a sequence of records (length, checksum, data, checksum: TFRecord), each of which holds a protobuf `Event`:

    Event   { 1: double wall_time  2: int64 step  3: string file_version  5: Summary  7: SessionLog { 1: enum status } }
    Summary { 1: repeated Value { 1: string tag  2: float simple_value } }
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_VARINT, _64_BIT, _BYTES, _32_BIT = 0, 1, 2, 5
_START = 1  # SessionLog.status: TensorBoard forgets what other files hold from this event's step on


class EventFile:
    """One event file; a folder may hold several, one per session of a run.

    Args:
        folder: made if it is missing.
        purge_step: points of earlier sessions from this step on don't count.
    """

    def __init__(self, folder: str | Path, *, purge_step: int | None = None) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = open(folder / name, "wb")  # noqa: SIM115
        self._write(_event(now, 0, _field(3, b"brain.Event:2")))
        if purge_step is not None:
            self._write(_event(now, purge_step, _field(7, _field(1, _START))))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point per name; it has left the process when this returns."""
        summary = b"".join(_field(1, _field(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(_event(time.time(), step, _field(5, summary)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        self._file.flush()


def _event(wall_time: float, step: int, content: bytes) -> bytes:
    return _key(1, _64_BIT) + struct.pack("<d", wall_time) + _field(2, step) + content


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _key(number, _VARINT) + _varint(value)
    return _key(number, _BYTES) + _varint(len(value)) + value


def _float(number: int, value: float) -> bytes:
    return _key(number, _32_BIT) + struct.pack("<f", value)


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    if value < 0:
        raise ValueError(f"only numbers >= 0 are written, got {value}")
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _crc_table() -> Iterator[int]:
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        yield byte


_TABLE = tuple(_crc_table())


def _checksum(data: bytes) -> bytes:
    """Masked CRC-32C, as TFRecord wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
