"""Checkpoints: bitwise, whole or not at all, on any mesh, and clear words when something is wrong."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hermes_jax.learner import manifest
from hermes_jax.learner.checkpoint import CheckpointError, Checkpoints, named_leaves
from hermes_jax.telemetry.compilations import Compilations


class State(NamedTuple):
    params: dict
    opt_state: tuple
    update: jax.Array


seal = Checkpoints._seal
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def new_state(seed: int = 0, size: int = 64) -> State:
    key = jax.random.key(seed)
    params = {
        "embed": {"embedding": jax.random.normal(key, (size, 8))},
        "layers": ({"w": jnp.ones((8, 8))}, {"w": jnp.full((8, 8), 0.5, jnp.bfloat16)}),
    }
    return State(params, OPTIMIZER.init(params), jnp.int32(0))


@jax.jit
def grads_of(params):
    return jax.grad(lambda p: sum(jnp.sum(jnp.sin(x.astype(jnp.float32)) ** 2) for x in jax.tree.leaves(p)))(params)


def update(state: State) -> State:
    updates, opt_state = OPTIMIZER.update(grads_of(state.params), state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state, state.update + 1)


donating_update = jax.jit(update, donate_argnums=0)


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def host_copy(state):
    return jax.tree.map(lambda x: np.array(x, copy=True), state)


def assert_bitwise(state, expected):
    found, wanted = named_leaves(state), named_leaves(expected)
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert (np.asarray(found[name]).dtype, np.asarray(found[name]).tobytes()) == (array.dtype, array.tobytes()), (
            name
        )


def saved(directory: Path, *steps: int, keep_last: int = 9) -> dict[int, State]:
    """Saves these steps of a run; returns them as host copies."""
    checkpoints = Checkpoints(directory, keep_last=keep_last)
    state, found = new_state(), {}
    for step in range(1, max(steps) + 1):
        state = update(state)
        if step in steps:
            checkpoints.save(step, state, {"cursor": step})
            found[step] = host_copy(state)
    checkpoints.close()
    return found


def buffers() -> set[int]:
    """Addresses of all arrays of jax that are on one device."""
    return {array.unsafe_buffer_pointer() for array in jax.live_arrays() if len(array.devices()) == 1}


def damage(path: Path) -> None:
    """Cuts off the last half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("copies", [True, False])
def test_saved_while_training_goes_on_bitwise(copies, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=9, copies=copies)
    state, expected = new_state(size=20_000), {}
    for step in range(1, 5):
        state = donating_update(state)
        expected[step] = host_copy(state)
        checkpoints.save(step, state, {"step": step, "pending": [[1, 2], {"a": None}], "config": "seed: 0\n"})
        if not copies:
            assert checkpoints._writing is not None, "save waits for no disk"
            checkpoints.wait_for_arrays()
        state = donating_update(donating_update(state))  # at once: the arrays that were saved are gone
    checkpoints.wait()
    for step, arrays in expected.items():
        restored = checkpoints.restore(abstract(state), step)
        assert_bitwise(restored.state, arrays)
        assert restored.host == {"step": step, "pending": [[1, 2], {"a": None}], "config": "seed: 0\n"}
    checkpoints.close()


def test_without_copies_a_save_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoints, "_seal", lambda self: gate.wait(60) and seal(self))
    gate, state = threading.Event(), {"a": jnp.ones(1000)}
    memory_before = buffers()
    checkpoints = Checkpoints(tmp_path, copies=False)
    checkpoints.save(1, state, {})
    assert buffers() == memory_before
    waiting = threading.Thread(target=checkpoints.wait_for_arrays)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "the arrays are not written yet"
    gate.set()
    waiting.join(60)
    assert not waiting.is_alive()
    checkpoints.close()
    assert checkpoints.report() == ()


def test_a_save_compiles_nothing_and_its_copies_end_with_the_writing(tmp_path):
    """Not with the next save: until then they would only take memory."""
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    state = {"a": jax.device_put(np.ones((7, 11, 13), np.float32), sharding), "b": jnp.arange(17)}
    arrays_before = len(jax.live_arrays())
    checkpoints = Checkpoints(tmp_path)
    with Compilations() as compilations:
        checkpoints.save(1, state, {})
    assert compilations.count == 0
    end = time.monotonic() + 60
    while not (tmp_path / "1").exists() or len(jax.live_arrays()) > arrays_before:
        assert time.monotonic() < end, "the copies are still there"
        time.sleep(0.02)
    checkpoints.close()


def test_restored_state_trains_on_bitwise_and_can_be_donated(tmp_path):
    states = saved(tmp_path, 3, 5)
    restored = Checkpoints(tmp_path).restore(abstract(new_state()), 3)
    state = restored.state
    for _ in range(2):
        state = donating_update(state)
    straight = new_state()
    for _ in range(3):
        straight = update(straight)
    for _ in range(2):
        straight = donating_update(straight)
    assert_bitwise(state, host_copy(straight))
    assert restored.host == {"cursor": 3}
    assert_bitwise(Checkpoints(tmp_path).restore(abstract(new_state())).state, states[5])


def test_last_and_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=2)
    for step, metric in enumerate([0.5, 0.9, None, 0.9, float("nan"), 0.1, 0.2], start=1):
        checkpoints.save(step, {"x": jnp.float32(step)}, {}, metric=metric)
    checkpoints.wait()
    assert manifest.steps(tmp_path) == [2, 4, 6, 7]
    assert (checkpoints.best_step(), checkpoints.latest_step()) == (4, 7)
    checkpoints.close()


def test_a_new_writer_keeps_by_the_same_rule(tmp_path):
    first = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    first.save(1, {"x": jnp.float32(1)}, {}, metric=0.9)
    first.save(2, {"x": jnp.float32(2)}, {}, metric=0.1)
    first.close()
    second = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    second.save(3, {"x": jnp.float32(3)}, {}, metric=0.2)
    second.close()
    assert manifest.steps(tmp_path) == [1, 3]


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda folder: damage(largest_file(folder)), "bytes"),
        (lambda folder: largest_file(folder).unlink(), "is missing"),
        (lambda folder: damage(folder / manifest.NAME), "damaged"),
        (lambda folder: (folder / manifest.NAME).unlink(), "missing"),
        (lambda folder: damage(folder / "host" / "metadata"), "host/metadata"),
    ],
    ids=["truncated", "file missing", "manifest truncated", "manifest missing", "host state truncated"],
)
def test_damaged_newest_falls_back_to_the_one_before_and_says_so(tmp_path, harm, why):
    states = saved(tmp_path, 2, 4)
    harm(tmp_path / "4")
    checkpoints = Checkpoints(tmp_path)
    restored = checkpoints.restore(abstract(new_state()))
    assert restored.step == checkpoints.latest_step() == 2
    assert_bitwise(restored.state, states[2])
    assert len(restored.skipped) == 1
    assert restored.skipped[0].startswith("step 4 is incomplete: ")
    assert why in restored.skipped[0]
    assert restored.skipped == checkpoints.report()
    with pytest.raises(CheckpointError, match=r"step 4 .* is incomplete: .*choose another step"):
        checkpoints.restore(abstract(new_state()), 4)
    checkpoints.save(4, new_state(), {})
    checkpoints.close()
    assert Checkpoints(tmp_path).restore(abstract(new_state())).step == 4, "the damaged one was replaced"


def test_one_flipped_bit_is_seen(tmp_path):
    saved(tmp_path, 1, 2)
    path = largest_file(tmp_path / "2")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    restored = Checkpoints(tmp_path).restore(abstract(new_state()))
    assert restored.step == 1
    assert "other bytes" in restored.skipped[0]


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    saved(tmp_path, 2, 4)
    damage(largest_file(tmp_path / "4"))
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(3, new_state(), {})
    checkpoints.close()
    assert manifest.steps(tmp_path) == [3]


def test_nothing_whole_is_an_error_that_lists_what_is_wrong(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Checkpoints(tmp_path).restore(abstract(new_state()))
    assert Checkpoints(tmp_path).latest_step() is None
    assert Checkpoints(tmp_path / "none", read_only=True).latest_step() is None
    saved(tmp_path, 1)
    damage(largest_file(tmp_path / "1"))
    with pytest.raises(CheckpointError, match=r"nothing to resume from .*step 1 is incomplete"):
        Checkpoints(tmp_path).restore(abstract(new_state()))
    for restore in (lambda c: c.restore(abstract(new_state()), 7), lambda c: c.restore_host(7)):
        with pytest.raises(CheckpointError, match=r"there is no checkpoint of step 7 in .*; there are none at all"):
            restore(Checkpoints(tmp_path / "none", read_only=True))
        with pytest.raises(CheckpointError, match=r"there is no checkpoint of step 7 in .*; there are: 1$"):
            restore(Checkpoints(tmp_path))
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in"):
        Checkpoints(tmp_path).restore_host()


def test_an_existing_step_is_refused_and_newer_ones_can_be_discarded(tmp_path):
    states = saved(tmp_path, 1, 2, 3)
    checkpoints = Checkpoints(tmp_path, keep_last=9)
    with pytest.raises(CheckpointError, match=r"step 2 is already saved .*discard_after"):
        checkpoints.save(2, new_state(), {})
    assert_bitwise(checkpoints.restore(abstract(new_state()), 2).state, states[2])
    checkpoints.discard_after(1)
    assert manifest.steps(tmp_path) == [1]
    checkpoints.save(2, new_state(7), {"branch": True})
    checkpoints.close()
    assert Checkpoints(tmp_path).restore_host() == {"branch": True}


@pytest.mark.parametrize("host", [{"a": (1, 2)}, {1: 2}, {"a": float("nan")}, {"a": np.float32(1)}, {"a": object()}])
def test_host_state_that_json_would_change_is_refused(tmp_path, host):
    with pytest.raises(CheckpointError, match="host's state"):
        Checkpoints(tmp_path).save(1, new_state(), host)


def test_another_model_is_named(tmp_path):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"embedding is \(\(64, 8\), 'float32'\) there and \(\(32, 8\)"):
        Checkpoints(tmp_path).restore(abstract(new_state(size=32)))
    state = new_state()
    with pytest.raises(CheckpointError, match=r"params/head is not in it.*config\.yaml"):
        Checkpoints(tmp_path).restore(abstract(state._replace(params={**state.params, "head": jnp.ones(3)})))
    with pytest.raises(CheckpointError, match="is not needed"):
        Checkpoints(tmp_path).restore(abstract(new_state()._replace(opt_state=())))


def test_readers_never_write(tmp_path):
    saved(tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))
    reader = Checkpoints(tmp_path, read_only=True)
    assert reader.restore(abstract(new_state())).step == 1
    with pytest.raises(CheckpointError, match="read-only"):
        reader.save(2, new_state(), {})
    reader.close()
    assert sorted(tmp_path.rglob("*")) == before


def test_names_do_not_depend_on_the_classes_of_the_tree():
    assert list(named_leaves(new_state()))[:2] == ["params/embed/embedding", "params/layers/0/w"]
    assert list(named_leaves({"a": [1, {"b": 2}]})) == ["a/0", "a/1/b"]
    with pytest.raises(ValueError, match="same path"):
        named_leaves({"a": {"b": 1}, "a/b": 2})


# -- full disks ----------------------------------------------------------------------------------------------------


def random_state(seed: int, size: int) -> dict:
    return {"w": jnp.asarray(np.random.default_rng(seed).standard_normal(size, np.float32))}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(mount)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no right to mount a small file system: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_disk_full_while_saving(small_disk, asynchronous):
    checkpoints = Checkpoints(small_disk / "checkpoints", keep_last=1, asynchronous=asynchronous)
    good, big = random_state(1, 1 << 18), random_state(2, 1 << 21)
    checkpoints.save(1, good, {"step": 1})
    with pytest.raises(CheckpointError, match=r"could not save step 2 .*step 1 is intact.*disk full"):  # noqa: PT012
        checkpoints.save(2, big, {"step": 2})
        checkpoints.wait()
    checkpoints.wait()
    assert checkpoints.latest_step() == 1
    assert_bitwise(checkpoints.restore(abstract(good)).state, host_copy(good))
    assert not manifest.unfinished(checkpoints.directory), "the half-written bytes are given back"
    checkpoints.save(2, good, {"step": 2})
    checkpoints.wait()
    assert checkpoints.restore(abstract(good)).host == {"step": 2}
    checkpoints.close()


def test_a_file_that_may_not_grow(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    good = random_state(1, 1 << 16)
    checkpoints.save(1, good, {"step": 1})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match=r"could not save step 2 .*step 1 is intact"):  # noqa: PT012
            checkpoints.save(2, random_state(2, 1 << 20), {"step": 2})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert_bitwise(checkpoints.restore(abstract(good)).state, host_copy(good))
    checkpoints.close()


# -- other meshes --------------------------------------------------------------------------------------------------

RESHARD = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from hermes_jax.learner.checkpoint import Checkpoints

def shardings(shape):
    mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    return {"w": NamedSharding(mesh, P("fsdp", "tensor")), "n": NamedSharding(mesh, P())}

values = {"w": np.random.default_rng(0).standard_normal((16, 8), np.float32), "n": np.int32(7)}
update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
checkpoints = Checkpoints(sys.argv[1])
for step, (before, after) in enumerate([((1, 8, 1), (2, 2, 2)), ((2, 2, 2), (1, 1, 1)), ((1, 1, 1), (4, 1, 2))], 1):
    state = jax.device_put(values, shardings(before))
    checkpoints.save(step, state, {})
    update(state)
    there = shardings(after)
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there[name]) for name, x in values.items()}
    restored = checkpoints.restore(abstract).state
    for name, array in values.items():
        assert restored[name].sharding == there[name], (name, restored[name].sharding)
        assert np.asarray(restored[name]).tobytes() == np.asarray(array).tobytes(), name
checkpoints.close()
print("equal")
"""


def test_restored_on_another_mesh(tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", RESHARD, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


def test_manifest_lists_every_array_with_shape_and_dtype(tmp_path):
    saved(tmp_path, 1)
    body = json.loads((tmp_path / "1" / manifest.NAME).read_text())
    assert body["leaves"]["params/layers/1/w"] == [[8, 8], "bfloat16"]
    assert body["step"] == 1
