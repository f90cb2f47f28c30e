"""One device and eight give the same gradient, whichever way the eight are arranged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MESHES = ("8,1,1", "2,2,2", "1,2,4")


@pytest.fixture(scope="module")
def report():
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    command = [sys.executable, "-m", "tests.learner.sharded_run", *MESHES]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_log_probs_and_metrics_do_not_depend_on_the_mesh(report, mesh):
    result = report[f"({mesh.replace(',', ', ')})"]
    assert result["gradient"] <= 1e-5
    assert result["score"] <= 1e-5
    assert result["metrics"] <= 1e-4
    assert result["sharding_kept"], "the new state lies as the old one did"


def test_fsdp_and_tensor_share_the_state_out(report):
    assert report["(8, 1, 1)"]["bytes_share"] == 1.0
    assert report["(2, 2, 2)"]["bytes_share"] < 0.3
    assert report["(1, 2, 4)"]["bytes_share"] < 0.2
