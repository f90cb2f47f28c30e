"""The README's first command, for real: a clone, a new environment, and a policy that gets better."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from hermes_jax.telemetry.episodes import load_episodes

ROOT = Path(__file__).resolve().parents[1]


def _quickstart(clone: Path, *overrides: str) -> str:
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", *overrides],
        cwd=clone,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a newcomer has: the committed files, and nothing else."""
    to = tmp_path_factory.mktemp("newcomer") / "hermes-jax"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(to)], check=True)
    return to


@pytest.fixture(scope="module")
def finished(clone: Path) -> tuple[Path, str]:
    """A whole quickstart: its run folder and what it printed."""
    printed = _quickstart(clone)
    [run] = (clone / "runs").iterdir()
    return run, printed


def test_grpo_takes_held_out_success_above_85_percent(finished: tuple[Path, str]) -> None:
    report = json.loads((finished[0] / "report.json").read_text())
    before, after = report["before"], report["after"]
    assert before["eval/episodes"] == after["eval/episodes"] >= 2 * 200
    assert 0.20 <= before["eval/success"] <= 0.50
    assert before["eval/success_greedy"] <= 0.60
    assert after["eval/success"] >= 0.85
    assert after["eval/success_greedy"] >= 0.85


def test_the_person_sees_progress_a_table_and_where_the_files_are(finished: tuple[Path, str]) -> None:
    run, printed = finished
    assert "before" in printed
    assert "after" in printed
    for heading in ("reward", "success", "KL", "tok/s", "left"):
        assert heading in printed
    for path in (run / "metrics.jsonl", run / "episodes", run / "final"):
        assert path.exists()
        assert f"{run.name}/{path.name}" in printed


def test_the_tools_ran_for_real(finished: tuple[Path, str]) -> None:
    """Rewards come from files that commands wrote: a full reward needs a call, and its result is in the messages."""
    solved = [e for e in load_episodes(finished[0], kind="train") if e["reward"] == 1.0]
    assert len(solved) > 100
    for episode in solved:
        assert any(message["role"] == "tool" for message in episode["messages"])
        assert episode["counters"]["tool_calls"] >= 1


def test_it_works_again(clone: Path, finished: tuple[Path, str]) -> None:
    printed = _quickstart(clone, "warm_start.steps=31", "env.total_steps=1", "env.eval_episodes=4")
    assert "train 1/1" in printed
    assert len(list((clone / "runs").iterdir())) == 2


def test_saved_advantages_follow_the_rewards(finished: tuple[Path, str]) -> None:
    groups: dict[str, list[dict]] = {}
    for episode in load_episodes(finished[0], step=1, kind="train"):
        groups.setdefault(episode["task_id"], []).append(episode)
    assert len(groups) == 8
    for group in groups.values():
        rewards = [e["reward"] for e in group]
        mean = sum(rewards) / len(rewards)
        for episode in group:
            wanted = 0 if max(rewards) == min(rewards) else (episode["reward"] > mean) - (episode["reward"] < mean)
            assert (episode["advantage"] > 0) - (episode["advantage"] < 0) == wanted
