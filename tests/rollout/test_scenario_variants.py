"""Scenarios of the same kinds as the shared ones, made at random: the invariants hold for all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapters_scenarios import token_scenario
from tests.rollout.test_scenarios import FILE, TOKENIZER, ids

PIECES = st.lists(
    st.sampled_from(["zq", "x", "k!", "<|e|>", "<|s|>user\n", "\n", " ", "</think>", "é🦀", 300, 255, 195, 260])
)
CALLS = st.sampled_from(
    [
        '<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>',
        '<tool_call>{"name": "u"}</tool_call>',
        '<tool_call>{"name": }</tool_call>',
    ]
)


@st.composite
def scenarios(draw):
    template = draw(st.sampled_from(sorted(FILE["templates"])))
    thought = draw(st.sampled_from(["", "<think>a</think>"]))
    if template == "think_switch":
        thought = "a</think>"
    replies = []
    for _ in range(draw(st.integers(0, 3))):
        calls = "".join(draw(st.lists(CALLS, min_size=1, max_size=3)))
        replies.append([thought, *without_end(draw(PIECES)), thought and "</think>", calls])
    replies.append([thought, *without_end(draw(PIECES)), thought and "</think>"])
    engine = [
        {
            "reply": {
                "tokens": [t for t in reply if t != ""] + ([257] if draw(st.booleans()) else []),
                "finish_reason": "stop",
            }
        }
        for reply in replies
    ]
    results = draw(st.lists(PIECES.map(lambda p: "".join(t for t in p if isinstance(t, str))), min_size=1, max_size=2))
    return {
        "id": "variant",
        "template": template,
        "messages": [{"role": "user", "content": draw(st.text(max_size=9))}],
        "tools": [{"name": "t", "arguments": {}, "returns": results}],
        "engine": engine,
        "template_arguments": {"enable_thinking": draw(st.booleans())},
    }


def without_end(pieces):
    """A closing think tag in the middle would end the thinking earlier; that is the parser's test."""
    return [p for p in pieces if p != "</think>"]


@settings(deadline=None, max_examples=150)
@given(scenarios())
def test_invariants_of_any_scenario(scenario):
    result = token_scenario(FILE, scenario)
    assert result["outcome"] == "completed", result["error"]
    assert len(result["requests"]) == len(scenario["engine"])
    sampled = [ids(turn["reply"]["tokens"]) for turn in scenario["engine"]]
    trained = [t for s in result["sequences"] for t, m in zip(s["tokens"], s["mask"], strict=True) if m]
    assert trained == [t for reply in sampled for t in reply]
    for turn, (request, reply) in enumerate(zip(result["requests"], sampled, strict=True)):
        prompt = request["prompt"]
        found = [s for s in result["sequences"] if turn in s["turn"]]
        assert len(found) == bool(reply)
        for sequence in found:
            assert sequence["tokens"][: len(prompt) + len(reply)] == prompt + reply
            assert sequence["mask"][len(prompt) : len(prompt) + len(reply)] == [1] * len(reply)
        check_specials(prompt, scenario["template"], sampled[:turn])


def check_specials(prompt, template, sampled):
    """Special ids stand only where the template wrote them, or where they were sampled."""
    calls = [TOKENIZER.decode(reply).count("<tool_call>") for reply in sampled]
    answers = len(sampled) if template == "grouped" else sum(calls)
    assert prompt.count(256) == 1 + len(sampled) + answers + 1
    most = (template == "bos") + sum(reply.count(260) for reply in sampled)
    assert prompt.count(260) == most or (
        template == "think_strip" and prompt.count(260) < most
    )  # cut out with thinking
    assert prompt.count(257) == 1 + len(sampled) + answers
