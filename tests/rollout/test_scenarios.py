"""Every scenario of masks_and_tokens.json, through the adapter, token by token."""

from __future__ import annotations

import itertools

import pytest

from hermes_jax.rollout.chat import ChatRenderer
from tests.adapters_scenarios import CaseTokenizer, token_scenario
from tests.data.cases import cases_io

FILE = cases_io.load("masks_and_tokens.json")
TOKENIZER = CaseTokenizer(FILE["tokenizer"])
SCENARIOS = FILE["scenarios"]


@pytest.fixture(scope="module")
def results():
    return {scenario["id"]: token_scenario(FILE, scenario) for scenario in SCENARIOS}


def test_there_are_as_many_as_announced():
    assert len(SCENARIOS) == 38


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s["id"])
def test_scenario(scenario, results):
    """The primary expectation, not one of those accepted besides."""
    for result in results[scenario["id"]]["members"]:
        expected = scenario["expected"]
        assert result["outcome"] == expected["outcome"], result["error"]
        assert len(result["requests"]) == expected["requests"]
        check_requests(scenario["engine"], result)
        check_sequences(expected, result)
        check_facts(expected, result)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s["id"])
def test_invariants(scenario, results):
    for result in results[scenario["id"]]["members"]:
        sequences = result["sequences"]
        for sequence in sequences:
            lengths = {len(sequence[key]) for key in ("tokens", "mask", "logprobs", "turn", "versions")}
            assert lengths == {len(sequence["tokens"])}
            assert all(
                (turn >= 0) == (mask == 1) for turn, mask in zip(sequence["turn"], sequence["mask"], strict=True)
            )
        if not sequences:
            continue
        sampled = [t for s in sequences for t, m in zip(s["tokens"], s["mask"], strict=True) if m]
        replies = [ids(turn["reply"]["tokens"]) for turn in scenario["engine"]]
        stop = TOKENIZER.added[TOKENIZER.special_tokens["eos_token"]].id
        assert sampled == [t for r in replies for t in (r[: r.index(stop) + 1] if stop in r else r)]
        logprobs = [p for s in sequences for p, m in zip(s["logprobs"], s["mask"], strict=True) if m]
        assert logprobs == [-(k + 1) / 8 for k in range(len(sampled))]
        conditioned = [r["prompt"] for r in result["requests"]]
        assert all(any(s["tokens"][: len(prompt)] == prompt for s in sequences) for prompt in conditioned)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.get("full_render_equals")], ids=lambda s: s["id"])
def test_sequence_equals_the_rendering_of_the_whole_conversation(scenario, results):
    messages, results_left = list(scenario["messages"]), [t["returns"] for t in scenario.get("tools", ())]
    for number, turn in enumerate(scenario["engine"]):
        content = TOKENIZER.decode(ids(turn["reply"]["tokens"])[:-1])
        messages.append({"role": "assistant", "content": content})
        if number + 1 < len(scenario["engine"]):
            messages += [{"role": "tool", "content": text} for text in results_left]
    renderer = ChatRenderer(TOKENIZER, FILE["templates"][scenario["template"]])
    whole = renderer.encode(renderer.render(messages, add_generation_prompt=False))
    (sequence,) = results[scenario["id"]]["sequences"]
    assert sequence["tokens"] == whole[: len(sequence["tokens"])]
    assert TOKENIZER.decode(whole[len(sequence["tokens"]) :]).strip() == ""


def check_requests(engine, result):
    for expected, request in zip(engine, result["requests"], strict=True):
        expected = expected["request"]
        if isinstance(expected["prompt"], list):
            assert request["prompt"] == ids(expected["prompt"])
        if "prompt_length" in expected:
            assert len(request["prompt"]) == expected["prompt_length"]
        if "max_tokens" in expected:
            assert request["max_tokens"] == expected["max_tokens"]


def check_sequences(expected, result):
    sequences = result["sequences"]
    if expected.get("trained_tokens") == 0:
        assert not sequences
        return
    assert len(sequences) == len(expected["sequences"])
    for wanted, sequence in zip(expected["sequences"], sequences, strict=True):
        at = 0
        for number, segment in enumerate(wanted["segments"]):
            if "tokens" in segment:
                want = ids(segment["tokens"])
                assert sequence["tokens"][at : at + len(want)] == want
            else:
                want = sequence["tokens"][at : sequence["turn"].index(wanted["segments"][number + 1]["turn"])]
                check_tool_messages(segment["tool_messages"], want)
            assert sequence["mask"][at : at + len(want)] == [segment["mask"]] * len(want)
            assert sequence["turn"][at : at + len(want)] == [segment["turn"]] * len(want)
            at += len(want)
        assert at == len(sequence["tokens"]) == wanted.get("n_tokens", at)
        assert sum(sequence["mask"]) == wanted["n_trained"]


def check_tool_messages(messages, tokens):
    text = TOKENIZER.decode(tokens)
    parts = text.removeprefix("\n").removesuffix("<|s|>assistant\n").split("<|e|>\n")
    assert parts.pop() == ""
    assert len(parts) == len(messages)
    for message, part in zip(messages, parts, strict=True):
        content = part.removeprefix("<|s|>tool\n")
        assert content != part
        assert content == message.get("equals", content)
        assert all(word in content for word in message.get("contains", ()))


def check_facts(expected, result):
    for key in ("tools_run", "content", "oldest_version"):
        if key in expected:
            assert result[key] == expected[key]
    for name, count in expected.get("counters", {}).items():
        assert result["counters"][name] == count
    if "versions" in expected:
        versions = [v for s in result["sequences"] for v, m in zip(s["versions"], s["mask"], strict=True) if m]
        assert [[v, len(list(run))] for v, run in itertools.groupby(versions)] == expected["versions"]
    if expected["outcome"] == "error":
        assert "turn 0" in result["error"]
    for words in {
        "names the request and both lengths": ("3", "2"),
        "names the id and the vocabulary size": ("999", "320"),
    }.get(expected.get("error", ""), ()):
        assert words in result["error"]


def ids(parts):
    return [i for part in parts for i in ([part] if isinstance(part, int) else TOKENIZER.encode_plain(part))]
