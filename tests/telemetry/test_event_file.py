"""TensorBoard's own format, read by somebody else's code."""

from __future__ import annotations

import struct

import pytest

from hermes_jax.telemetry.event_file import EventFile


def records(folder):
    """Data of all records of the only file, its checksums verified."""
    from tensorboardX.record_writer import masked_crc32c

    [path] = folder.iterdir()
    data = path.read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        assert data[8:12] == struct.pack("<I", masked_crc32c(data[:8]))
        content = data[12 : 12 + size]
        assert data[12 + size : 16 + size] == struct.pack("<I", masked_crc32c(content))
        data = data[16 + size :]
        yield content


def test_records_and_events(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    file = EventFile(tmp_path, purge_step=300)
    file.add_scalars(2**40, {"a/b": 0.1, "ü": float("inf"), "c": -2.5})
    file.add_scalars(0, {f"name {n}": float(n) for n in range(200)})
    file.close()
    first, purge, row, long = map(Event.FromString, records(tmp_path))
    assert first.file_version == "brain.Event:2"
    assert (purge.step, purge.session_log.status) == (300, 1)
    assert row.step == 2**40
    assert {v.tag: v.simple_value for v in row.summary.value} == {
        "a/b": pytest.approx(0.1),
        "ü": float("inf"),
        "c": -2.5,
    }
    assert [v.simple_value for v in long.summary.value] == list(range(200))
    assert row.wall_time > 1e9


def test_two_sessions_have_two_files(tmp_path):
    for _ in range(2):
        EventFile(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


def test_negative_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="-1"):
        EventFile(tmp_path).add_scalars(-1, {"a": 1.0})
