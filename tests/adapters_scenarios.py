"""masks_and_tokens scenarios to the project's collection: its renderer, parser, agent loop and group."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_jax.data.trajectory import Episode
from hermes_jax.rollout.agent import Agent, EpisodeLimits
from hermes_jax.rollout.chat import ChatRenderer
from hermes_jax.rollout.codec import AddedToken
from hermes_jax.rollout.collect import Collector, Gate, collect_group
from hermes_jax.rollout.environment import Environment
from hermes_jax.rollout.parsers import get_parser
from tests.adapters_async import finished
from tests.rollout.fakes import FakeClock, Reply, Request, ScriptedEngine, ScriptedTool


class CaseTokenizer:
    """The byte tokenizer that the head of the file describes, as a `TextCodec`."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.vocab_size = spec["vocab_size"]
        self.added = {text: AddedToken(i, special=True) for text, i in spec["specials"].items()}
        self.special_tokens = {"eos_token": spec["eos"], "pad_token": "<|pad|>", "bos_token": "<|b|>"}
        self._merges = {text.encode(): i for text, i in spec["merges"].items()}
        named = {i: text.encode() for text, i in (spec["specials"] | spec["merges"]).items()}
        self._bytes = {byte: bytes([byte]) for byte in range(256)} | named  # the vocabulary has unused ids as well
        self._special = re.compile("(" + "|".join(map(re.escape, spec["specials"])) + ")")

    def encode(self, text: str, *, after: int | None = None) -> list[int]:
        pieces = self._special.split(text)
        return [
            i
            for place, piece in enumerate(pieces)
            for i in ([self.added[piece].id] if place % 2 else self.encode_plain(piece))
        ]

    def encode_plain(self, text: str, *, first: bool = False) -> list[int]:
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            merge = max((m for m in self._merges if data.startswith(m, at)), key=len, default=data[at : at + 1])
            ids.append(self._merges.get(merge, merge[0]))
            at += len(merge)
        return ids

    def decode(self, ids: Sequence[int], *, after: int | None = None) -> str:
        return b"".join(self._bytes.get(i, b"") for i in ids).decode("utf-8", "replace")


class CaseEnvironment(Environment):
    """The scenario's messages; its environment, if it has one, appends to what it is given and returns nothing."""

    def format_prompt(self, item: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return item["messages"]

    async def prepare(self, item: Mapping[str, Any], messages: list[dict[str, Any]], ctx: Any) -> None:
        if "environment" in item and ctx == 0:
            messages.append({"role": "system", "content": "for member 0 only"})

    async def compute_reward(self, item: Mapping[str, Any], episode: Episode, ctx: Any) -> None:
        return None


class _Member(int):
    """A context that knows its member only."""

    async def cleanup(self) -> None:
        pass


def token_scenario(file: Mapping[str, Any], scenario: Mapping[str, Any]) -> dict[str, Any]:
    """Plays one scenario; of a group, `members` has every member and the rest is of the first one."""
    return finished(_play(file, scenario))


async def _play(file: Mapping[str, Any], scenario: Mapping[str, Any]) -> dict[str, Any]:
    clock, tokenizer = FakeClock(), CaseTokenizer(file["tokenizer"])
    engine = ScriptedEngine(_replies(tokenizer, [turn["reply"] for turn in scenario["engine"]]), clock)
    renderer = ChatRenderer(
        tokenizer,
        file["templates"][scenario["template"]],
        template_arguments=scenario.get("template_arguments"),
    )
    runs: list[str] = []
    agent = Agent(
        engine=engine,
        renderer=renderer,
        parser=get_parser(file["tool_call_format"]),
        tools=_tools(scenario.get("tools", ()), clock, runs),
        limits=EpisodeLimits(**{"context_limit": 1 << 20, **scenario.get("config", {})}),
        clock=clock,
    )
    collector = Collector(agent, CaseEnvironment(), lambda task, member: _Member(member), Gate(8))
    group = await collect_group(collector, scenario, group_size=scenario.get("group_size", 1), seed=0)
    members = [
        _result(episode, [r for r in engine.requests if _member_of(r) == episode.member], runs)
        for episode in group.episodes
    ]
    return members[0] | {"members": members}


def _member_of(request: Request) -> int:
    return int(str(request.session).split("/")[-2])


def _replies(tokenizer: CaseTokenizer, specs: Sequence[Mapping[str, Any]]) -> list[Reply]:
    """The engine's replies; the k-th token sampled has log-prob -(k + 1) / 8, what follows an end is not sampled."""
    replies, sampled = [], 0
    end = tokenizer.added[tokenizer.special_tokens["eos_token"]].id
    for spec in specs:
        parts = ([part] if isinstance(part, int) else tokenizer.encode_plain(part) for part in spec["tokens"])
        ids = [i for part in parts for i in part]
        logprobs = spec.get("logprobs", [-(k + 1) / 8 for k in range(sampled, sampled + len(ids))])
        replies.append(Reply(ids, spec["finish_reason"], spec.get("version", 0), logprobs))
        sampled += ids.index(end) + 1 if end in ids else len(ids)
    return replies


def _tools(specs: Sequence[Mapping[str, Any]], clock: FakeClock, runs: list[str]) -> dict[str, ScriptedTool]:
    tools: dict[str, ScriptedTool] = {}
    for spec in specs:
        returns = spec["returns"] if isinstance(spec["returns"], list) else [spec["returns"]]
        tool = tools.setdefault(spec["name"], ScriptedTool(spec["name"], [], clock, spec.get("takes_s", 0.0), runs))
        tool.answers = [*tool.answers, (spec["arguments"], list(returns))]
    return tools


def _result(episode: Episode, requests: Sequence[Request], runs: Sequence[str]) -> dict[str, Any]:
    return {
        "outcome": episode.outcome.value,
        "requests": [{"prompt": list(r.prompt), "max_tokens": r.sampling.max_tokens} for r in requests],
        "sequences": [
            {
                "tokens": t.tokens.tolist(),
                "mask": t.mask.astype(int).tolist(),
                "turn": t.turn.tolist(),
                "logprobs": t.logprobs.tolist(),
                "versions": t.policy_version.tolist(),
            }
            for t in episode.trajectories
        ],
        "oldest_version": min((t.oldest_version for t in episode.trajectories), default=-1),
        "tools_run": list(runs),
        "counters": dict(episode.counters),
        "content": episode.messages[-1]["content"],
        "error": episode.error,
    }
