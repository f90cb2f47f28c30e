"""The benchmarks of starts and of saves at tiny sizes: they run, and what they print is what was done."""

import pytest

from envs.terminal_test.policy import build
from tests.scripts.bench_runs import figures

TINY = (
    "env.groups_per_step=1",
    "env.group_size=2",
    "openai.slots=4",
    "env.max_token_length=8",
    "env.max_agent_turns=1",
)


def test_the_second_start_compiles_nothing_itself():
    options = [part for option in (*TINY, "learner.row_widths=[128]") for part in ("--set", option)]
    found = figures("start.py", *options)
    cold, again = found["cold"], found["again"][0]
    assert found["programs"]["files"] > 10
    assert cold["compilations"] == again["compilations"] > 10, "what comes from the folder counts as well"
    assert again["compile_s"] < 0.5 * cold["compile_s"]
    for start in (cold, again):
        assert 0 < start["reached_s"]["parts_open"] < start["seconds_to_first_step"]
        assert start["seconds_to_first_step"] < start["reached_s"]["first_step_done"]
        assert start["first_step_s"]["collect"] > 0


def test_a_save_is_measured_beside_updates(tmp_path):
    build(tmp_path / "model", seed=0)
    sizes = ("--rows", "2", "--width", "64", "--model", tmp_path / "model", "--folder", tmp_path)
    found = figures("save_memory.py", *sizes)
    with_save, without = found["with_save"], found["without_save"]
    assert with_save["shape"] == without["shape"] == [1, 2, 64]
    assert found["ratio"] == pytest.approx(with_save["peak_gib"] / without["peak_gib"], rel=1e-4)
    assert with_save["save_s"] > without["save_s"]
    assert 0 < with_save["state_gib"] < with_save["peak_gib"]
