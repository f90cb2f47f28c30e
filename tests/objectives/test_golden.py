"""Every golden case, in float32, through the adapter."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.adapters_golden import FUNCTIONS, golden
from tests.data.golden import golden_io

CALLS = [call for case in golden_io.load_cases() for call in golden_io.calls(case)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_case(call):
    assert golden_io.compare(call, golden(call.function, call.inputs, call.params), "float32") == []


@pytest.mark.parametrize("call", [c for c in CALLS if None in c.params.values()][::3], ids=lambda call: call.id)
def test_absent_parameters_are_as_good_as_null_ones(call):
    given = {name: value for name, value in call.params.items() if value is not None}
    assert golden_io.compare(call, golden(call.function, call.inputs, given), "float32") == []


@pytest.mark.parametrize("function", ["gae", "whiten", "logits_stats", "entropy_bonus_loss"])
def test_parameters_with_a_usual_value_may_be_absent(function):
    call = next(c for c in CALLS if c.function == function and not c.params.get("whiten"))
    usual = {"whiten": False, "whiten_eps": 1e-8, "ddof": 1, "temperature": 1.0}
    with_them, without = (
        golden(function, call.inputs, params)
        for params in (call.params | usual, {k: v for k, v in call.params.items() if k not in usual})
    )
    jax.tree.map(np.testing.assert_array_equal, with_them, without)


def test_no_case_and_no_function_is_left_out():
    files = sorted(path.stem for path in golden_io.CASES.glob("*.json"))
    assert len(files) == 62
    assert sorted({call.id.split("[")[0].replace("/", "__") for call in CALLS}) == files
    assert {call.function for call in CALLS} == set(FUNCTIONS)


def test_a_function_that_is_not_built_says_so():
    with pytest.raises(NotImplementedError, match="golden function rubric"):
        golden("rubric", {}, {})


def test_the_comparison_notices_a_wrong_number():
    call = next(call for call in CALLS if call.function == "policy_loss")
    out = dict(golden(call.function, call.inputs, call.params))
    out["loss"] = out["loss"] + 1e-3
    assert golden_io.compare(call, out, "float32")
