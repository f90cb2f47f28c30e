"""Scenario `resume-equals-straight`: a run that is killed and resumed is, bit by bit, the run that was not."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from hermes_jax.learner import manifest
from hermes_jax.learner.checkpoint import Checkpoints
from hermes_jax.telemetry.episodes import ARRAYS, load_episodes
from tests.e2e.runs import Command, metrics


def saved_state(run: Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by name."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = manifest.read(run / "checkpoints" / str(step)).leaves
    abstract = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=device) for name, (shape, dtype) in leaves.items()}
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    restored = checkpoints.restore(abstract, step)
    checkpoints.close()
    return {name: np.asarray(array) for name, array in restored.state.items()}


def episodes(run: Path) -> list[dict]:
    """Saved episodes of all kinds, in order, without their timings."""
    found = list(load_episodes(run))
    for episode in found:
        del episode["timings"]
    return found


def test_parameters_and_optimizer_state(straight: Path, interrupted: Path) -> None:
    left, right = saved_state(straight, 6), saved_state(interrupted, 6)
    assert {name.split("/")[0] for name in left} == {"params", "opt_state", "update", "skipped", "skipped_in_a_row"}
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name, strict=True)
    assert left["update"] == 12


def test_metrics(straight: Path, interrupted: Path) -> None:
    """Every step's, those of the warm start and the evaluations included; learning rates are among them."""
    left, right = metrics(straight), metrics(interrupted)
    assert left.keys() == right.keys()
    assert ("train", 6) in left
    assert ("warm_start", 24) in left
    for place, row in left.items():
        assert row == right[place], place
    assert {"update/learning_rate", "train/reward", "update/loss", "eval/success"} <= left["train", 6].keys()


def test_prompt_order_and_episodes(straight: Path, interrupted: Path) -> None:
    left, right = episodes(straight), episodes(interrupted)
    assert [e["task_id"] for e in left] == [e["task_id"] for e in right]
    assert sum(e["counters"].get("tool_calls", 0) for e in left) > len(left) / 2, "the tools are real, and used"
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one.pop("trajectories"), other.pop("trajectories"), strict=True):
            for name in ARRAYS:
                np.testing.assert_array_equal(a[name], b[name], strict=True)
        assert one == other


def test_on_another_mesh(straight: Path, command: Command, tmp_path: Path) -> None:
    """Step 4 on 8 devices in 3 axes, from the checkpoint that one device wrote."""
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "checkpoints" / "6")
    mesh = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    flags = "--xla_force_host_platform_device_count=8"
    done = command.run("train", "--resume", run, "env.total_steps=4", "env.eval_episodes=0", *mesh, XLA_FLAGS=flags)
    assert "resumed from the checkpoint of step 3" in done.out
    left, right = saved_state(straight, 3), saved_state(run, 3)
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name, strict=True)
    here, there = metrics(straight)["train", 4], metrics(run)["train", 4]
    assert here.keys() == there.keys()
    for name, value in here.items():
        if name != "batch/padding_share":  # rows are filled otherwise where several devices share a batch
            assert there[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
