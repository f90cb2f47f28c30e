"""A run whose programs were compiled by another process is, bit by bit, the run that compiled its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.e2e.runs import Command, metrics
from tests.faults.test_resume_equals_straight import saved_state

SHORT = ("warm_start.steps=6", "warm_start.warmup_steps=0", "env.eval_episodes=0", "checkpoint.every_steps=1")


def test_resumed_with_kept_programs_equals_compiled_anew(command: Command, tmp_path: Path) -> None:
    one, two, cache = tmp_path / "one", tmp_path / "two", tmp_path / "cache"
    command.train(f"run_dir={one}", "compilation_cache=off", "env.total_steps=2", *SHORT)
    command.train(f"run_dir={two}", f"compilation_cache={cache}", "env.total_steps=1", *SHORT)
    kept = sum(file.is_file() for file in cache.rglob("*-cache"))
    assert kept > 10
    resumed = command.run("train", "--resume", two, "env.total_steps=2")
    assert "warning: Error" not in resumed.err
    assert "step 1" in resumed.out, resumed
    new = sum(file.is_file() for file in cache.rglob("*-cache")) - kept
    assert new < 0.2 * kept, f"{new} programs were compiled again, {kept} were there"
    left, right = saved_state(one, 2), saved_state(two, 2)
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name, strict=True)
    assert metrics(one)["train", 2] == metrics(two)["train", 2]
