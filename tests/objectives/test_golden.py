"""Every golden case, in float32, through the adapter."""

from __future__ import annotations

import pytest

from tests.adapters_golden import FUNCTIONS, golden
from tests.data.golden import golden_io

CALLS = [call for case in golden_io.load_cases() for call in golden_io.calls(case)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_case(call):
    assert golden_io.compare(call, golden(call.function, call.inputs, call.params), "float32") == []


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
