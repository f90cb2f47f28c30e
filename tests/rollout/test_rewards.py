"""Every reward case, and what the cases do not say: arguments by name, logs, hostile and odd functions."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from hermes_jax.objectives import group_advantages
from hermes_jax.rollout.rewards import (
    RewardFunction,
    Rewards,
    RewardValue,
    combine_rewards,
    evaluate_reward_functions,
    function_name,
    named,
    normalise_batch,
    normalise_reward,
)
from hermes_jax.tools.worker import WorkerServer
from tests import adapters_rewards as adapters
from tests.data.cases import cases_io

FILE = cases_io.load("rewards_and_groups.json")


def cases(family: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in FILE[family] if "property" not in case]


def close(value: float | None, expected: float | None, relative: float) -> bool:
    if value is None or expected is None:
        return value is expected
    return value == 0.0 if expected == 0.0 else abs(value - expected) <= relative * abs(expected)


@pytest.fixture(scope="module")
def server() -> Iterator[WorkerServer]:
    with WorkerServer(max_calls=4) as server:
        yield server


@pytest.mark.parametrize("case", cases("reward_functions"))
def test_reward_function_cases(case: dict) -> None:
    expected = case["expected"]
    begun = time.monotonic()
    found = adapters.reward_function(case)
    assert time.monotonic() - begun <= expected.get("within_seconds", 60)
    assert found["rewards"] == expected["rewards"]
    assert all(value is None or type(value) is float for value in found["rewards"])
    assert json.loads(json.dumps(found["rewards"])) == found["rewards"]
    functions = len(expected.get("wrap", [1]))
    assert found["counters"] == {key: value * functions for key, value in expected["counters"].items()}
    for name, count in expected.get("counters_also", {}).items():
        assert found["counters_also"][name] == count
    assert len(set(found["names"])) == functions
    assert all(re.fullmatch(r"\w+", name) for name in found["names"])


@pytest.mark.parametrize("case", cases("combining"))
def test_combining_cases(case: dict) -> None:
    assert adapters.combine(case)["rewards"] == case["expected"]["rewards"]


@pytest.mark.parametrize("case", cases("groups"))
def test_group_cases(case: dict) -> None:
    found, expected = adapters.group(case), case["expected"]
    assert (found["excluded"], found["counters"]) == (expected["excluded"], expected["counters"])
    for rule, values in expected["advantages"].items():
        relative = FILE["tolerance"].get(rule, {"relative": 0.0})["relative"]
        assert [
            (at, row) for at, row in enumerate(found["advantages"][rule]) if not close(row, values[at], relative)
        ] == []


def test_vectorised_equals_loop() -> None:
    draw = random.Random(0)
    for _ in range(200):
        rewards, ids = [], []
        for number in range(draw.randint(1, 5)):
            near, base = draw.random() < 0.3, draw.uniform(-2, 2)
            for _ in range(draw.randint(1, 9)):
                value = base + draw.choice([0.0, 1e-9]) if near else draw.uniform(-2, 2)
                rewards.append(None if draw.random() < 0.2 else value)
                ids.append(f"g{number}")
        order = draw.sample(range(len(ids)), len(ids))
        rewards, ids = [rewards[at] for at in order], [ids[at] for at in order]
        for options in adapters.RULES.values():
            whole = group_advantages(rewards, ids, **options).advantages
            for name in set(ids):
                at = [place for place, one in enumerate(ids) if one == name]
                alone = group_advantages([rewards[place] for place in at], [name] * len(at), **options).advantages
                np.testing.assert_allclose(whole[at], alone, rtol=0, atol=1e-6)


def test_shift() -> None:
    draw = random.Random(1)
    for _ in range(50):
        rewards = [draw.uniform(-2, 2) for _ in range(draw.randint(2, 9))]
        for options in adapters.RULES.values():
            one = group_advantages(rewards, [0] * len(rewards), **options).advantages
            two = group_advantages([reward + 3.5 for reward in rewards], [0] * len(rewards), **options).advantages
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-9)


class Odd:
    shape = (1,)

    def item(self) -> str:
        return "1"

    def __repr__(self) -> str:
        return "x" * 500


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (10**400, None),
        (Decimal("NaN"), None),
        (Decimal("sNaN"), None),
        (np.array([[0.5]]), 0.5),
        (np.array([0.5, 0.5]), None),
        (np.array([]), None),
        (np.array("0.5"), None),
        (np.array(1j), None),
        (np.bool_(True), 1.0),
        (np.float16(65504), 65504.0),
        (np.datetime64("2020-01-01"), None),
        (b"1", None),
        ({1.0}, None),
        (Odd(), None),
        (-0.0, 0.0),
    ],
)
def test_values_of_odd_types(value: Any, expected: float | None) -> None:
    reward = normalise_reward(value)
    assert reward.value == expected
    assert (reward.failure is None) == (expected is not None)
    assert len(reward.failure or "") < 300


@pytest.mark.parametrize(
    "values", ["01", {0: 1, 1: 1}, {0.0, 1.0}, b"01", 3, None, np.float64(1), [1], iter(range(10**9))]
)
def test_batches_of_the_wrong_shape_fail_all(values: Any) -> None:
    rewards = normalise_batch(values, 2)
    assert [reward.value for reward in rewards] == [None, None]
    assert all("for 2 samples" in (reward.failure or "") for reward in rewards)


def test_batches_keep_what_is_valid() -> None:
    found = [reward.value for reward in normalise_batch((1, None, "x", np.array([2.0])), 4)]
    assert found == [1.0, None, None, 2.0]
    assert [reward.value for reward in normalise_batch(np.array([[1.0], [0.5]]), 2)] == [1.0, 0.5]


def test_sums_that_overflow_fail_and_opinions_may_be_missing() -> None:
    big, none = RewardValue(1e308), RewardValue(None)
    assert combine_rewards({"a": big, "b": big}, {"a": 1, "b": 1}).failure is not None
    assert combine_rewards({"a": none}, {"a": 1}) == RewardValue(None)
    timeout = RewardValue(None, "too late", timed_out=True)
    assert combine_rewards({"a": RewardValue(1.0), "b": timeout}, {"a": 1, "b": 1}).timed_out
    with pytest.raises(ValueError, match="no weight for the reward part 'b'"):
        combine_rewards({"b": big}, {"a": 1})


def evaluate(server: WorkerServer, functions: list[RewardFunction], samples: list[dict], **options: Any) -> Rewards:
    return asyncio.run(evaluate_reward_functions(functions, samples, server, **options))


def test_functions_get_what_they_ask_for(server: WorkerServer) -> None:
    samples = [{"answer": "a", "completion": "a b"}, {"answer": "c", "completion": "d"}]

    def contains(answer: str, completion: str) -> bool:
        return answer in completion

    def length(completion: str, *, factor: float = 0.5) -> float:
        return factor * len(completion)

    def everything(**sample: Any) -> int:
        return len(sample)

    def whole_batch(completion: list[str]) -> list[int]:
        return [len(set(completion))] * len(completion)

    functions = [
        RewardFunction(contains),
        RewardFunction(functools.partial(length, factor=2.0), weight=0.1),
        RewardFunction(everything, weight=0.0),
        RewardFunction(whole_batch, style="batch", weight=-1, name="spread"),
    ]
    result = evaluate(server, functions, samples)
    assert [{name: part.value for name, part in parts.items()} for parts in result.parts] == [
        {"contains": 1.0, "length": 6.0, "everything": 2.0, "spread": 2.0},
        {"contains": 0.0, "length": 2.0, "everything": 2.0, "spread": 2.0},
    ]
    assert [total.value for total in result.totals] == pytest.approx([-0.4, -1.8])
    assert dict(result.counters) == {"reward_missing": 0, "verifier_errors": 0, "verifier_timeouts": 0}
    with pytest.raises(ValueError, match=r"'asks' asks for 'solution'.*a sample has answer, completion"):
        evaluate(server, [RewardFunction(lambda solution: 1, name="asks")], samples)
    assert evaluate(server, functions, []).totals == ()


def test_the_log_names_function_sample_and_exception(server: WorkerServer, caplog: pytest.LogCaptureFixture) -> None:
    def strict(x: int) -> float:
        return 1 / x

    with caplog.at_level(logging.WARNING):
        result = evaluate(server, [RewardFunction(strict)], [{"x": 1}, {"x": 0}], labels=["task-7/0", "task-7/1"])
    [record] = caplog.records
    message = record.getMessage()
    assert [
        word for word in ("'strict'", "task-7/1", "ZeroDivisionError", "division by zero") if word not in message
    ] == []
    assert dict(result.failures) == {"strict": 1}
    assert "ZeroDivisionError" in (result.totals[1].failure or "")


def test_a_failed_metric_of_weight_zero_is_counted_but_costs_no_reward(server: WorkerServer) -> None:
    functions = [RewardFunction(lambda x: x, name="a"), RewardFunction(lambda x: 1 / 0, weight=0, name="b")]
    result = evaluate(server, functions, [{"x": 2}])
    assert result.totals == (RewardValue(2.0),)
    assert dict(result.counters) == {"reward_missing": 0, "verifier_errors": 1, "verifier_timeouts": 0}


def test_a_function_may_run_an_event_loop_of_its_own(server: WorkerServer) -> None:
    def own_loop() -> float:
        return asyncio.run(asyncio.sleep(0, 0.5))

    assert evaluate(server, [RewardFunction(own_loop)], [{}]).totals == (RewardValue(0.5),)


@pytest.mark.parametrize("style", ["per_sample", "batch"])
def test_a_busy_loop_is_ended(server: WorkerServer, style: Any) -> None:
    def spin() -> None:
        while True:
            pass

    result = evaluate(server, [RewardFunction(spin, timeout_s=0.5, style=style)], [{}, {}])
    assert dict(result.counters) == {"reward_missing": 2, "verifier_errors": 2, "verifier_timeouts": 2}
    assert result.totals[0].failure == "spin: the call did not end within 0.5 s"


def test_names_are_usable_and_unique() -> None:
    def score() -> None: ...

    functions: list[Callable[..., Any]] = [score, functools.partial(score), lambda: 1, adapters.Verifier(), len]
    names = [function_name(function) for function in functions]
    assert names[:2] == ["score", "score"]
    assert re.fullmatch(r"lambda_line_\d+", names[2])
    assert names[3:] == ["Verifier", "len"]
    assert function_name(adapters.Verifier().verify) == "Verifier_verify"
    assert list(named([RewardFunction(score)] * 3)) == ["score", "score_2", "score_3"]
    taken = [RewardFunction(score, name="score_2"), RewardFunction(score), RewardFunction(score)]
    assert list(named(taken)) == ["score_2", "score", "score_3"]
    with pytest.raises(ValueError, match="two reward functions are named 'x'"):
        named([RewardFunction(score, name="x"), RewardFunction(score, name="x")])
    with pytest.raises(ValueError, match="weight 0"):
        named([RewardFunction(score, weight=0)])
    with pytest.raises(ValueError, match="finite"):
        named([RewardFunction(score, weight=math.nan)])
