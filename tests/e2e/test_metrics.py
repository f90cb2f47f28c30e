"""What a run writes down about itself."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hermes_jax.telemetry.episodes import load_episodes
from hermes_jax.telemetry.metrics import METRICS, describe
from tests.e2e.runs import metrics, rows

EVERY_STEP = """
    train/reward train/reward_part/calls train/success train/outcome/completed train/response_tokens train/truncated
    groups/constant groups/too_few update/entropy_mean update/kl_ref_k1 update/kl_ref_k3 update/ratio_mean
    update/ratio_max update/clip_frac_low update/clip_frac_high update/grad_norm update/learning_rate
    correction/logprob_diff_abs_mean correction/logprob_diff_abs_max batch/padding_share speed/generated_tokens_per_s
    speed/trained_tokens_per_s speed/mfu system/compilations seconds/collect seconds/score seconds/update
    seconds/publish seconds/step device/collect_idle_s device/collect_idle_share device/update_idle_s
    device/update_idle_share update/update_skipped update/skipped_total loop_lag_s
""".split()
"""What the telemetry of a step has to show."""
PHASES = ("collect", "pack", "score", "update", "publish", "episodes", "evaluate", "checkpoint")


def train_rows(run: Path) -> list[dict[str, float]]:
    found = metrics(run, all_names=True)
    return [row for (phase, step), row in sorted(found.items()) if phase == "train" and step > 0]


def test_every_kind_is_there_and_finite(straight: Path) -> None:
    steps = train_rows(straight)
    assert len(steps) == 6
    for row in steps:
        assert not set(EVERY_STEP) - row.keys()
    for row in rows(straight):
        for name, value in row.items():
            assert name in ("phase", "step") or (value is not None and math.isfinite(value)), name
            assert name in ("phase", "step") or describe(name)
            assert name in METRICS or not name.startswith("train/counter/"), "each is explained"


def test_shares_are_shares(straight: Path) -> None:
    for row in train_rows(straight):
        for name, value in row.items():
            if describe(name).unit == "share":
                assert 0 <= value <= 1, name


def test_nothing_compiles_after_the_second_step(straight: Path) -> None:
    steps = train_rows(straight)
    assert len({row["batch/tokens"] for row in steps}) > 1, "lengths differ"
    assert [row["system/compilations"] for row in steps[2:]] == [0] * 4


def test_phases_add_up_to_the_step(straight: Path) -> None:
    for row in train_rows(straight):
        phases = sum(row[f"seconds/{name}"] for name in PHASES)
        assert phases <= row["seconds/step"]
        assert row["seconds/step"] - phases < 0.1 * row["seconds/step"] + 0.1


def test_engine_and_learner_agree_and_the_loop_is_free(straight: Path) -> None:
    for row in train_rows(straight)[2:]:
        assert row["correction/logprob_diff_abs_mean"] <= 1e-4
        assert row["correction/logprob_diff_abs_max"] <= 2e-3
        assert row["update/first_pass_ratio_deviation"] <= 1e-5
        assert row["loop_lag_s"] < 1.0


def test_metrics_are_those_of_the_saved_episodes(straight: Path) -> None:
    for step, row in enumerate(train_rows(straight), start=1):
        played = list(load_episodes(straight, step=step, kind="train"))
        assert len(played) == row["train/episodes"] == 8
        assert np.mean([episode["reward"] for episode in played]) == row["train/reward"]
        assert np.mean([episode["success"] for episode in played]) == row["train/success"]
        sampled = sum(int(t["mask"].sum()) for episode in played for t in episode["trajectories"])
        assert sampled / 8 == row["train/response_tokens"]
        versions = {int(v) for e in played for t in e["trajectories"] for v in t["policy_version"][t["mask"]]}
        assert versions == {step - 1} == {int(row["policy_version"])}
        for episode in played:
            assert {"total", "model", "sandbox", "reward"} <= episode["timings"].keys()
            assert ("tools" in episode["timings"]) == ("tool" in [m["role"] for m in episode["messages"]])
            assert [m["role"] for m in episode["messages"]][:2] == ["user", "assistant"]


def test_progress_is_shown(straight: Path) -> None:
    printed = (straight.parent / "printed").read_text()
    assert "chat template: every turn extends the ids before it" in printed
    assert "objective: loss = " in printed
    [line] = [line for line in printed.splitlines() if line.startswith("train 6/6")]
    for word in ("reward", "success", "KL", "tok/s", "left"):
        assert word in line
    first, *later = [line for line in printed.splitlines() if line.startswith("train ")]
    assert "left" not in first, "it has compiled"
    assert all("left" in line for line in later)
    assert ["eval" in line for line in (first, *later)] == [False, False, True, True, True, True], "each third step"
    assert "4 held-out tasks" in printed
    assert f"metrics: {straight}/metrics.jsonl" in printed
