"""Figures and warnings about rewards over many steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hermes_jax.telemetry.alarms import StepRewards, accuracies, reward_alarms
from tests import adapters_rewards as adapters
from tests.data.cases import cases_io

CASES = [pytest.param(case, id=case["id"]) for case in cases_io.load("rewards_and_groups.json")["metrics"]]


@pytest.mark.parametrize("case", CASES)
def test_metric_cases(case: dict[str, Any]) -> None:
    found, expected = adapters.metrics(case), case["expected"]
    if "warning" not in expected:
        assert found == pytest.approx(expected)
        return
    words = {
        "all-constant-for-long": ["groups_constant", "too easy or too hard", "temperature", "constant", "10 steps"],
        "missing-for-long": ["reward_missing", "'per_sample'", "160 failed calls", "10 steps"],
    }
    assert [word for word in words[case["id"]] if word not in found["warning"]] == []


def test_alarms_come_after_ten_steps_in_a_row_and_again_after_ten_more() -> None:
    good, constant = StepRewards(4, 3, 8, 3), StepRewards(4, 4, 8, 0)
    missing = StepRewards(4, 0, 8, 4)
    assert reward_alarms([constant] * 9 + [good] + [constant] * 9) == []
    assert [bool(reward_alarms([constant] * steps)) for steps in (9, 10, 11, 20)] == [False, True, False, True]
    assert reward_alarms([StepRewards(0, 0, 0, 0)] * 10) == []
    [warning] = reward_alarms([good] + [missing] * 10)
    assert "returned None" in warning
    assert len(reward_alarms([StepRewards(4, 4, 8, 8)] * 10)) == 2


def test_accuracies_of_nothing_are_nan() -> None:
    assert all(math.isnan(value) for value in accuracies(0, 0, 0).values())
    assert accuracies(0, 0, 3)["accuracy_over_all"] == 0.0
