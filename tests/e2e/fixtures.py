"""Runs that several tests look at; each is made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hermes_jax.learner import manifest
from tests.e2e.runs import Command, kill_when


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Starts commands of the package."""
    return Command(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="session")
def straight(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of six steps that nothing disturbed."""
    run = tmp_path_factory.mktemp("straight") / "run"
    done = command.train(f"run_dir={run}")
    (run.parent / "printed").write_text(done.out + done.err)
    return run


@pytest.fixture(scope="session")
def interrupted(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed in its warm start and again after step 3 was saved."""
    run = tmp_path_factory.mktemp("interrupted") / "run"
    start = ("--config", "tiny.yaml", f"run_dir={run}")
    first = command.start("train", *start)
    kill_when(first, (run / "warm_start" / "9").exists)
    first.communicate()
    assert not (run / "start").exists()
    assert '"warm_start", "step": 9' in (run / "metrics.jsonl").read_text()
    second = command.start("train", *start, "--resume")
    kill_when(second, (run / "checkpoints" / "3").exists)
    assert "resumed from the checkpoint of warm-start step" in second.communicate()[0]
    assert manifest.steps(run / "checkpoints") == [3]
    third = command.run("train", "--resume", run)
    assert "resumed from the checkpoint of step 3" in third.out
    return run


@pytest.fixture(scope="session")
def warm_policy(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF folder of a policy that calls tools: where the training of `straight` began."""
    folder = tmp_path_factory.mktemp("policy") / "warm"
    shutil.copytree(straight / "start", folder)
    return folder
