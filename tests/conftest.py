"""Fixtures that several folders of tests share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_jax.host_memory import reuse_freed_memory
from tests.e2e.fixtures import command, interrupted, straight, warm_policy  # noqa: F401

REPOSITORY = Path(__file__).parent.parent

reuse_freed_memory()  # as the trainer does; tests are several times faster with it


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct: `HERMES_JAX_SMOLLM2`, else models/smollm2, made if absent."""
    given = os.environ.get("HERMES_JAX_SMOLLM2")
    folder = Path(given) if given else REPOSITORY / "models" / "smollm2"
    subprocess.run([sys.executable, REPOSITORY / "scripts" / "get_smollm2.py", "--to", folder], check=True)
    return folder
