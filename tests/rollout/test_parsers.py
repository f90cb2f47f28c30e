"""The hermes cases, and what holds for any text."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_jax.rollout.parsers import get_parser
from tests.adapters_parsers import parse_tool_calls
from tests.data.cases import cases_io

CASES = cases_io.load("tool_parsers/hermes.json")
PARSER = get_parser("hermes")
TAGS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {}}', "\n", '"']
)
TEXTS = st.lists(TAGS | st.text(max_size=8), max_size=12).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("case", [c for c in CASES if "property" not in c], ids=lambda c: c["id"])
def test_case(case):
    found = parse_tool_calls("hermes", case["text"], case.get("tools"))
    assert any(agrees(found, expected) for expected in (case["expected"], *case.get("also_accept", ()))), found
    if case["expected"].get("ids_distinct"):
        assert len({call["id"] for call in found["calls"]}) == len(found["calls"])


def agrees(found, expected):
    calls = [(call["name"], call["arguments"]) for call in expected["calls"]]
    content = expected["content"] is None or cases_io.fold(found["content"]) == cases_io.fold(expected["content"])
    same = json.dumps([(c["name"], c["arguments"]) for c in found["calls"]]) == json.dumps(calls)  # true is not 1
    return content and same and found["errors"] == expected["errors"]


def test_prefixes():
    (case,) = [c for c in CASES if c.get("property") == "prefixes"]
    check_prefixes(case["text"], case["complete_at"])


def check_prefixes(text, complete_at):
    whole = [(c.name, c.arguments) for c in PARSER.parse(text).calls]
    for cut in range(len(text) + 1):
        turn = PARSER.parse(text[:cut])
        calls = [(c.name, c.arguments) for c in turn.calls]
        assert calls == whole[: len(calls)]
        assert len(calls) >= sum(end <= cut for end in complete_at)
        assert len(turn.errors) <= 1


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "<think>",
        "</think>",
        "<tool_call></tool_call>",
        "<tool_call> ",
        '<tool_call>{"',
        '<tool_call>{"a": "\\"',
        '<tool_call>{"a": [',
        '<tool_call>{"name": "a", "arguments": "\\"\\"',
    ],
)
def test_time_is_linear(unit):
    (case,) = [c for c in CASES if c.get("property") == "linear_time"]
    expected, seconds = case["expected"], []
    for size in expected["sizes"]:
        start = time.perf_counter()
        PARSER.parse(unit * size)
        seconds.append(time.perf_counter() - start)
    assert seconds[1] <= expected["max_seconds"]
    if seconds[1] > expected["ratio_checked_above_seconds"]:
        assert seconds[1] / seconds[0] <= expected["max_ratio"]


@settings(deadline=None)
@given(TEXTS)
def test_never_raises_and_loses_no_text(text):
    turn = PARSER.parse(text)
    assert len(turn.content) + len(turn.reasoning) <= len(text)
    json.dumps([dict(c.arguments) for c in turn.calls], allow_nan=False)
    if "<" not in text:
        assert turn.content == text.strip()
        assert not turn.entries


@settings(deadline=None)
@given(st.text(max_size=5), st.dictionaries(st.text(max_size=5), VALUES, max_size=3), st.text("ab \n", max_size=5))
def test_any_call_comes_back_exactly(name, arguments, around):
    payload = json.dumps({"name": "f" + name, "arguments": arguments}, ensure_ascii=False)
    turn = PARSER.parse(f"{around}<tool_call>{payload}</tool_call>{around}")
    ((call,), content) = turn.calls, turn.content
    assert (call.name, json.dumps(call.arguments)) == ("f" + name, json.dumps(arguments))
    assert content == (around + around).strip()
    assert not turn.errors


@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=2), min_size=1, max_size=3))
def test_prefixes_of_any_well_formed_turn(arguments):
    text, ends = "Look:\n", []
    for values in arguments:
        text += f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': values})}\n</tool_call>\n"
        ends.append(len(text) - 1)
    check_prefixes(text, ends)


@pytest.mark.parametrize(
    ("text", "content", "calls", "errors"),
    [
        ("Write <tool_call> and </tool_call> around it.", "Write <tool_call> and </tool_call> around it.", 0, 0),
        ("<tool_call>ping</tool_call>", "", 0, 1),
        ("Now: <tool_call>ping(n=1)</tool_call>", "Now:", 0, 1),
        ("the tag is <tool_call>", "the tag is <tool_call>", 0, 0),
        ("Go.\n<tool_call>\n", "Go.", 0, 1),
        ('<tool_call>{"name": "a"} and </tool_call><tool_call>{"name": "b"}</tool_call>', "", 1, 1),
        (
            '<tool_call>{"name": "a", "arguments": {"x": "oops}}</tool_call><tool_call>{"name": "b"}</tool_call>',
            "",
            1,
            1,
        ),
        ('<tool_call>{"name": "a", "arguments": {"x": "use <tool_call> tags"},}</tool_call>', "", 0, 1),
        ('<tool_call>{"name": "a", "arguments": NaN}</tool_call>', "", 0, 1),
        ('<tool_call>{"name": ["a"], "arguments": {}}</tool_call>', "", 0, 1),
        ('<tool_call>[{"name": "a"}]</tool_call>', "", 0, 1),
        ("<think>a</think>b</think>c", "c", 0, 0),
    ],
)
def test_edges(text, content, calls, errors):
    turn = PARSER.parse(text)
    assert (turn.content, len(turn.calls), len(turn.errors)) == (content, calls, errors)


def test_a_malformed_call_says_what_is_wrong_and_shows_itself():
    (error,) = PARSER.parse('<tool_call>{"name": "f", "arguments": [1]}</tool_call>').errors
    assert error.reason == '"arguments" must be a JSON object, not an array'
    assert error.text.startswith('<tool_call>{"name"')


def test_thinking_that_began_in_the_prompt_and_never_ends_calls_nothing():
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert PARSER.parse(text).calls
    assert not PARSER.parse(text, thinking_open=True).entries
    assert PARSER.parse("hm</think>" + text, thinking_open=True).calls


def test_unknown_format_lists_those_there_are():
    with pytest.raises(ValueError, match=r"'hermess'; available: hermes, qwen"):
        get_parser("hermess")
    with pytest.raises(NotImplementedError, match="kimi_k2"):
        parse_tool_calls("kimi_k2", "x")
