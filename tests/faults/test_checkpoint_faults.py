"""Scenarios `kill-in-writer` and `keep-one`: a trainer is killed while it saves, a new one goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hermes_jax.learner import manifest
from hermes_jax.learner.checkpoint import Checkpoints

# Saves step 10, says so, and saves step 20 when it is told to.
TRAINER = """
import sys
import jax.numpy as jnp, numpy as np
from hermes_jax.learner.checkpoint import Checkpoints

directory, keep, arrays, size = sys.argv[1], *map(int, sys.argv[2:])
checkpoints = Checkpoints(directory, keep_last=keep)
for step in (10, 20):
    random = np.random.default_rng(step)
    state = {f"w{i}": jnp.asarray(random.standard_normal(size, np.float32)) for i in range(arrays)}
    if step == 20:
        sys.stdin.readline()
    checkpoints.save(step, state, {"step": step})
    checkpoints.wait()
    print(f"saved {step}", flush=True)
"""


def start(directory: Path, *, keep: int, arrays: int, size: int) -> subprocess.Popen[str]:
    """A trainer that has saved step 10 and is about to save step 20."""
    command = [sys.executable, "-c", TRAINER, str(directory), str(keep), str(arrays), str(size)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    trainer = subprocess.Popen(command, text=True, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "saved 10\n"
    return trainer


def go_on(trainer: subprocess.Popen[str]) -> None:
    assert trainer.stdin is not None
    trainer.stdin.write("\n")
    trainer.stdin.flush()


def kill(trainer: subprocess.Popen[str]) -> None:
    trainer.kill()
    trainer.communicate()


def bytes_in(folders: list[Path]) -> int:
    total = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(f"{parent}/{name}").st_size
    return total


def state_of(step: int, arrays: int, size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {f"w{i}": random.standard_normal(size, np.float32) for i in range(arrays)}


def resume(directory: Path, arrays: int, size: int) -> tuple[int, tuple[str, ...]]:
    """What a new trainer finds; its arrays are compared bit by bit with those that were saved."""
    checkpoints = Checkpoints(directory)
    abstract = {f"w{i}": jax.ShapeDtypeStruct((size,), jnp.float32) for i in range(arrays)}
    restored = checkpoints.restore(abstract)
    for name, array in state_of(restored.step, arrays, size).items():
        np.testing.assert_array_equal(np.asarray(restored.state[name]), array)
    assert restored.host == {"step": restored.step}
    checkpoints.close()
    return restored.step, restored.skipped


def test_kill_in_writer(tmp_path):
    arrays, size = 16, 1 << 20
    trainer = start(tmp_path, keep=2, arrays=arrays, size=size)
    half = bytes_in([tmp_path / "10"]) / 2
    go_on(trainer)
    while (written := bytes_in(list(manifest.unfinished(tmp_path)))) < half:
        assert trainer.poll() is None
    kill(trainer)
    print(f"killed after {written / half / 2:.0%}")

    assert not (tmp_path / "20").exists()
    step, skipped = resume(tmp_path, arrays, size)
    assert step == 10
    assert len(skipped) == 1
    assert skipped[0].startswith("step 20 is incomplete")

    again = Checkpoints(tmp_path)
    assert again.latest_step() == 10
    again.save(20, {name: jnp.asarray(array) for name, array in state_of(20, arrays, size).items()}, {"step": 20})
    again.close()
    assert resume(tmp_path, arrays, size) == (20, ())
    assert not manifest.unfinished(tmp_path), "what the killed writer left is cleared away"


def test_keep_one(tmp_path):
    keep, arrays, size = 1, 4, 1 << 20
    trainer = start(tmp_path / "timed", keep=keep, arrays=arrays, size=size)
    began = time.monotonic()
    go_on(trainer)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "saved 20\n"
    whole = time.monotonic() - began
    trainer.wait()
    assert manifest.steps(tmp_path / "timed") == [20]

    def once(number: int) -> int:
        directory = tmp_path / str(number)
        trainer = start(directory, keep=keep, arrays=arrays, size=size)
        go_on(trainer)
        if number < 7:
            time.sleep(whole * number / 5)
        else:  # while step 10 is removed
            while not (directory / "20").exists():
                assert trainer.poll() is None
        kill(trainer)
        return resume(directory, arrays, size)[0]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(once, range(10)))
    assert set(found) <= {10, 20}, "never none"
    print(f"resumed from {found}")
