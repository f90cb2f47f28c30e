"""The adapters stand on their own: they work wherever they are called from, and say what is not built."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import adapters
from tests.data.cases import cases_io, make_hf_logits

SCENARIOS = cases_io.load("masks_and_tokens.json")
ROOT = Path(adapters.__file__).parents[1]
NAN = {"$": "nan"}


def reward_case(style: str, returns: object, count: int, **expected: object) -> dict:
    return {"style": style, "returns": returns, "expected": {"rewards": [None] * count, **expected}}


def test_they_run_inside_an_event_loop() -> None:
    async def inside() -> list:
        scenario = SCENARIOS["scenarios"][0]
        return [
            adapters.token_scenario(SCENARIOS, scenario)["outcome"],
            adapters.reward_function(reward_case("per_sample", [1, None], 2))["rewards"],
            adapters.combine({"functions": {"a": [1]}, "weights": {"a": 2}})["rewards"],
        ]

    assert asyncio.run(inside()) == ["completed", [1.0, None], [2.0]]


def test_they_run_from_another_directory(tmp_path: Path) -> None:
    """Reward functions too, though another process must import them there."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests import adapters; "
        "case = {'style': 'per_sample', 'returns': [0.5], 'expected': {'rewards': [0.5]}}; "
        "print(adapters.reward_function(case)['rewards'])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (found.stdout.strip(), found.returncode) == ("[0.5]", 0), found.stderr


def test_they_keep_no_state_between_calls() -> None:
    scenarios = SCENARIOS["scenarios"][:6]
    before = json.dumps(scenarios)
    first = [adapters.token_scenario(SCENARIOS, one) for one in scenarios]
    assert [adapters.token_scenario(SCENARIOS, one) for one in reversed(scenarios)] == first[::-1]
    assert json.dumps(scenarios) == before


def test_every_notation_of_a_value_may_stand_inside_an_array() -> None:
    array = {"$": "numpy", "dtype": "float32", "shape": [3], "v": [1, NAN, {"$": "-inf"}]}
    found = adapters.reward_function(reward_case("batch", array, 3))
    assert found["rewards"] == [1.0, None, None]
    assert found["counters"] == {"reward_missing": 2, "verifier_errors": 2}


def test_failures_are_counted_once_however_the_function_is_wrapped() -> None:
    ways = ["partial", "lambda", "callable_object", "bound_method"]
    found = adapters.reward_function(reward_case("per_sample", [1, NAN], 2, wrap=ways))
    assert found["counters"] == {"reward_missing": 1, "verifier_errors": 1}
    assert len(set(found["names"])) == len(ways)


def test_parts_may_have_any_name() -> None:
    names = ["name", "sample", "self", "function", "class", "two words"]
    case = {"functions": {name: [1, 2] for name in names}, "weights": dict.fromkeys(names, 1)}
    assert adapters.combine(case)["rewards"] == [6.0, 12.0]


def test_what_follows_the_end_of_a_reply_is_no_sampled_token() -> None:
    call = '<tool_call>{"name": "ping"}</tool_call>'
    replies = [[call, 257, 258, 258], ["ok", 257]]
    scenario = {
        "id": "pads-between",
        "template": "plain",
        "messages": [{"role": "user", "content": "Go"}],
        "tools": [{"name": "ping", "arguments": {}, "returns": "pong"}],
        "engine": [{"reply": {"tokens": tokens, "finish_reason": "stop"}} for tokens in replies],
    }
    (sequence,) = adapters.token_scenario(SCENARIOS, scenario)["sequences"]
    logprobs = [p for p, sampled in zip(sequence["logprobs"], sequence["mask"], strict=True) if sampled]
    assert logprobs == [-(k + 1) / 8 for k in range(len(call) + 4)]


@pytest.mark.parametrize("token", [261, 299, 305, 319])
def test_unused_ids_of_the_vocabulary_have_no_text(token: int) -> None:
    scenario = {
        "id": "unused-id",
        "template": "plain",
        "messages": [{"role": "user", "content": "Go"}],
        "engine": [{"reply": {"tokens": ["a", token, "b", 257], "finish_reason": "stop"}}],
    }
    found = adapters.token_scenario(SCENARIOS, scenario)
    assert (found["outcome"], found["content"]) == ("completed", "ab")


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "gelu"}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"model_type": "gemma2"}],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_built_is_a_not_implemented_error(change: dict, tmp_path: Path) -> None:
    entry = json.loads((Path(make_hf_logits.__file__).parent / "hf_models.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(entry["models"][0]["config"] | change))
    with pytest.raises(NotImplementedError, match=next(iter(change))):
        adapters.hf_logits(tmp_path, np.zeros((1, 3), int))


def test_lengths_may_be_an_array(tmp_path: Path) -> None:
    entry = json.loads((Path(make_hf_logits.__file__).parent / "hf_models.json").read_text(encoding="utf-8"))
    case = next(one for one in entry["models"] if one["id"] == "llama-right-padding")
    make_hf_logits.write_model(case, tmp_path)
    ids = np.array(case["input_ids"])
    listed, array = (adapters.hf_logits(tmp_path, ids, lengths) for lengths in (case["lengths"], np.array([24, 13])))
    np.testing.assert_array_equal(listed, array)
