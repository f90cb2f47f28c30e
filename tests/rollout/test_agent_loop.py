"""The agent loop: limits, tools, deadlines, bad engine data, cancellation."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import pytest

from hermes_jax.data.trajectory import Outcome
from hermes_jax.engines.base import EngineError
from hermes_jax.rollout.agent import Agent, EpisodeLimits
from hermes_jax.rollout.agent_loop import run_episode
from hermes_jax.rollout.chat import ChatRenderer
from hermes_jax.rollout.deadline import DeadlinePassed, before
from hermes_jax.rollout.parsers import get_parser
from hermes_jax.rollout.tool_calls import readable
from hermes_jax.tools.registry import ToolResult
from hermes_jax.tools.sandbox import SandboxError
from tests.rollout.fakes import FakeClock, Reply, ScriptedEngine
from tests.rollout.test_chat import CHATML
from tests.rollout.tokenizers import codec, templates

RENDERER = ChatRenderer(codec("byte_level"), CHATML)
END = RENDERER.end_id(before_answer=False)
PROMPT = [{"role": "user", "content": "go"}]


def say(text, **options):
    return Reply([*RENDERER.codec.encode_plain(text), END], **options)


def call(name, arguments="{}"):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@dataclass
class FunctionTool:
    """A tool around any coroutine function."""

    function: object

    async def call(self, arguments, ctx):
        return await self.function(arguments, ctx)


def tools(**functions):
    return {name: FunctionTool(function) for name, function in functions.items()}


def play(replies, functions=(), clock=None, limits=None, messages=PROMPT, renderer=RENDERER, prepare=None, **options):
    clock = clock or FakeClock()
    engine = ScriptedEngine(replies, clock)
    agent = Agent(
        engine,
        renderer,
        get_parser("hermes"),
        tools(**dict(functions)),
        EpisodeLimits(**{"context_limit": 10_000, **(limits or {})}),
        clock=clock,
        **options,
    )
    episode = asyncio.run(run_episode(agent, messages, ctx="ctx", task_id="t1", member=2, seed=5, prepare=prepare))
    return episode, engine


async def pong(arguments, ctx):
    assert ctx == "ctx"
    return f"pong {arguments}"


def test_an_episode_with_a_tool():
    episode, engine = play([say(call("ping", '{"n": 1}')), say("It answered.")], {"ping": pong})
    assert episode.outcome is Outcome.COMPLETED
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[1]["tool_calls"][0]["function"] == {"name": "ping", "arguments": '{"n": 1}'}
    assert episode.messages[2]["tool_call_id"] == episode.messages[1]["tool_calls"][0]["id"]
    assert episode.messages[2]["content"] == "pong {'n': 1}"
    assert episode.counters["tool_calls"] == 1
    assert episode.counters["turns"] == 2
    assert episode.counters["sampled_tokens"] == episode.n_sampled
    assert set(episode.timings) == {"total", "model", "tools"}
    assert engine.released == ["t1#2"]
    assert [r.request_id for r in engine.requests] == ["t1#2/turn 0", "t1#2/turn 1"]
    assert len({r.sampling.seed for r in engine.requests}) == 2
    assert all(r.sampling.stop_ids == RENDERER.stop_ids for r in engine.requests)


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "go"}]

    async def prepare(own):
        own.append({"role": "system", "content": "mine"})
        own[0]["content"] = "changed"

    episode, _ = play([say("done")], messages=messages, prepare=prepare)
    assert messages == [{"role": "user", "content": "go"}]
    assert list(episode.messages[:-1]) == messages


def test_prepare_may_return_messages():
    async def prepare(own):
        return [{"role": "system", "content": "be brief"}, *own]

    episode, engine = play([say("done")], prepare=prepare)
    assert [m["role"] for m in episode.messages] == ["system", "user", "assistant"]
    assert "be brief" in RENDERER.codec.decode(engine.requests[0].prompt)


@pytest.mark.parametrize(
    ("text", "counter", "words"),
    [
        (call("warp"), "unknown_tools", ["no tool named 'warp'", "ping, scan"]),
        (call("ping", "[1]"), "malformed_calls", ["must be a JSON object, not an array", "<tool_call>{"]),
        (call("scan"), "tool_errors", ["scan failed: ZeroDivisionError: by nothing"]),
    ],
)
def test_a_bad_call_is_told_to_the_model(text, counter, words):
    async def scan(arguments, ctx):
        raise ZeroDivisionError("by nothing")

    episode, _ = play([say(text), say("Sorry.")], {"ping": pong, "scan": scan})
    assert episode.outcome is Outcome.COMPLETED
    assert episode.counters[counter] == 1
    assert all(word in episode.messages[2]["content"] for word in words)
    assert episode.n_sampled > 0


def test_a_tool_that_changes_its_arguments_changes_no_message():
    async def greedy(arguments, ctx):
        arguments["list"].append("more")
        arguments.clear()
        return "ok"

    episode, _ = play([say(call("greedy", '{"list": [1]}')), say("ok")], {"greedy": greedy})
    assert episode.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"list": [1]}'


def test_a_long_unknown_name_is_shortened():
    episode, _ = play([say(call("w" * 5000)), say("Sorry.")], {"ping": pong})
    assert len(episode.messages[2]["content"]) < 300


@pytest.mark.parametrize("fails", [False, True])
def test_tool_output_is_bounded_and_readable(fails):
    async def flood(arguments, ctx):
        text = "a" * 500_000 + "\ud83e" + "z" * 500_000
        if fails:
            raise ValueError(text)
        return text

    episode, _ = play([say(call("flood")), say("ok")], {"flood": flood}, limits={"tool_output_limit_bytes": 100})
    begin = "Error: flood failed: ValueError: " if fails else ""
    content = episode.messages[2]["content"]
    omitted = 1_000_003 + len(begin) - 100  # U+FFFD has three bytes
    assert content == (begin + "a" * 50)[:50] + f"\n[... {omitted} bytes left out ...]\n" + "z" * 50


def test_a_tool_that_keeps_the_limit_itself_is_not_cut_again():
    async def bounded(arguments, ctx):
        return ToolResult("x" * 200, bounded=True)

    limits = {"tool_output_limit_bytes": 100}
    episode, _ = play([say(call("bounded")), say("ok")], {"bounded": bounded}, limits=limits)
    assert episode.messages[2]["content"] == "x" * 200


@pytest.mark.parametrize("limit", range(100, 113))
def test_the_limit_of_a_tool_result_is_in_bytes_and_cuts_no_character(limit):
    text = "aü€🦀" * 30  # 1, 2, 3 and 4 bytes: 300 in all

    async def long(arguments, ctx):
        return text

    episode, _ = play([say(call("long")), say("ok")], {"long": long}, limits={"tool_output_limit_bytes": limit})
    head, mark, tail = episode.messages[2]["content"].split("\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    shown = len((head + tail).encode())
    assert limit - 6 <= shown <= limit
    assert mark == f"[... {300 - shown} bytes left out ...]"


def test_readable():
    assert readable("x\ud83ey\ud83e\udd80\x00\u2028") == "x\ufffdy\U0001f980\x00\u2028"


def test_a_tool_past_its_deadline_is_cancelled_and_the_episode_goes_on():
    clock, ended = FakeClock(), []

    async def slow(arguments, ctx):
        try:
            await clock.sleep(1000)
        finally:
            ended.append(clock.now())

    episode, _ = play(
        [say(call("slow") + call("ping")), say("ok")], {"slow": slow, "ping": pong}, clock, {"tool_timeout_s": 3}
    )
    assert episode.outcome is Outcome.COMPLETED
    assert ended == [3]
    assert episode.messages[2]["content"] == "Error: slow was stopped: it did not finish within 3 s"
    assert episode.messages[3]["content"] == "pong {}"
    assert episode.counters["tool_timeouts"] == 1

    limits = {"tool_timeout_s": 3, "end_on_tool_timeout": True}
    episode, _ = play([say(call("slow"))], {"slow": slow}, clock, limits)
    assert episode.outcome is Outcome.TOOL_TIMEOUT
    assert episode.n_sampled > 0


def test_an_engine_that_hangs_ends_with_the_episodes_deadline():
    episode, engine = play([say("never", takes_s=1e9)], limits={"episode_timeout_s": 7})
    assert episode.outcome is Outcome.TIMEOUT
    assert "no end within 7 s" in episode.error
    assert engine.in_flight == 0
    assert engine.released


def test_turns_before_a_timeout_are_kept():
    clock = FakeClock()
    episode, _ = play([say(call("ping")), say("x", takes_s=100)], {"ping": pong}, clock, {"episode_timeout_s": 50})
    assert episode.outcome is Outcome.TIMEOUT
    assert episode.trajectories[0].n_sampled == len(say(call("ping")).token_ids)


def test_a_lost_sandbox_is_no_fault_of_the_policy():
    async def lost(arguments, ctx):
        raise SandboxError("the sandbox was lost")

    episode, _ = play([say(call("lost"))], {"lost": lost})
    assert episode.outcome is Outcome.ENV_ERROR
    assert "SandboxError: the sandbox was lost" in episode.error
    assert not episode.trajectories


def test_a_template_that_refuses_is_an_error_of_the_episode():
    template = CHATML + "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    episode, _ = play([say(call("ping"))], {"ping": pong}, renderer=ChatRenderer(codec("byte_level"), template))
    assert episode.outcome is Outcome.ERROR
    assert not episode.trajectories


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply([5, END], logprobs=[-1.0, math.nan]), ["log-prob nan", "position 1"]),
        (Reply([5, END], logprobs=[0.5, -1.0]), ["log-prob 0.5"]),
        (Reply([5, -1]), ["token id -1", "outside the vocabulary"]),
        (Reply([5] * 100, "length"), ["100 tokens although 20 were asked for"]),
        (Reply([5], "eaten"), ["finish reason 'eaten'"]),
        (Reply([7, END]), ["token id 7", "must not be sampled"]),
        (Reply([], error=EngineError("request r: 400 Bad Request")), ["400 Bad Request"]),
        (Reply([], error=KeyError("choices")), ["KeyError: 'choices'"]),
    ],
)
def test_bad_engine_data_never_trains(reply, words):
    limits = {"max_new_tokens": 20}
    episode, _ = play([reply], limits=limits, forbidden_ids=frozenset({7}))
    assert episode.outcome is Outcome.ERROR
    assert not episode.trajectories
    assert all(word in episode.error for word in ("task t1, member 2", *words))


def test_greedy_and_truncated_sampling_leave_no_trajectories():
    for options in ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        episode, engine = play([say("done")], **options)
        assert episode.outcome is Outcome.COMPLETED
        assert not episode.trajectories
        assert episode.counters["sampled_tokens"] > 0
        assert {k: getattr(engine.requests[0].sampling, k) for k in options} == options


def test_limits_on_tokens():
    reply = say(call("ping"))
    n = len(reply.token_ids)
    limits = {"max_new_tokens": n, "max_total_new_tokens": 2 * n + 3}
    episode, engine = play([reply, reply, Reply([5, 5, 5], "length")], {"ping": pong}, limits=limits)
    assert [r.sampling.max_tokens for r in engine.requests] == [n, n, 3]
    assert episode.outcome is Outcome.LENGTH
    episode, engine = play([reply, reply], {"ping": pong}, limits=limits | {"max_total_new_tokens": 2 * n})
    assert (episode.outcome, len(engine.requests)) == (Outcome.LENGTH, 2)


def test_calls_of_the_last_turn_still_run():
    runs = []

    async def note(arguments, ctx):
        runs.append(1)
        return "noted"

    episode, _ = play([say(call("note"))], {"note": note}, limits={"max_turns": 1})
    assert (episode.outcome, runs) == (Outcome.MAX_TURNS, [1])
    assert episode.messages[-1]["content"] == "noted"
    assert int(episode.trajectories[0].tokens[-1]) == END


def test_a_reply_that_was_broken_off_after_its_end_is_complete():
    """To go on after the end would sample in a context that no conversation has."""
    reply = Reply(say("done").token_ids, "abort")
    episode, engine = play([reply], limits={"resume_partial": True})
    assert (episode.outcome, len(engine.requests)) == (Outcome.COMPLETED, 1)
    assert episode.messages[-1]["content"] == "done"
    episode, _ = play([reply])
    assert episode.outcome is Outcome.ABORTED  # without leave to resume, the engine's word counts


def test_a_broken_off_reply_is_resumed_with_other_seeds_and_not_for_ever():
    replies = [Reply([5, 6], "abort", version=1), Reply([], "abort"), Reply([7], "abort")]
    episode, engine = play(replies, limits={"resume_partial": True, "max_new_tokens": 9})
    assert episode.outcome is Outcome.ABORTED
    assert len(engine.requests) == 2
    assert engine.requests[0].sampling.seed != engine.requests[1].sampling.seed
    assert engine.requests[1].sampling.max_tokens == 7


def test_a_deadline_in_the_past_asks_for_nothing():
    async def run():
        clock = FakeClock()
        with pytest.raises(DeadlinePassed):
            await before(0.0, clock, clock.sleep(5))
        assert clock.now() == 0

    asyncio.run(run())


def test_work_that_cancels_itself_is_an_error_and_not_a_cancellation():
    async def cancels(arguments, ctx):
        raise asyncio.CancelledError

    episode, _ = play([say(call("cancels")), say("ok")], {"cancels": cancels})
    assert episode.outcome is Outcome.COMPLETED
    assert "was cancelled from inside" in episode.messages[2]["content"]


@pytest.mark.parametrize("where", ["model", "tool", "prepare"])
def test_cancellation_ends_the_episode_as_aborted(where):
    cleaned = []

    async def forever(*_):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(where)

    class Engine(ScriptedEngine):
        async def _answer(self, reply, session):
            if where == "model":
                await forever()
            return await super()._answer(reply, session)

    async def run():
        engine = Engine([say(call("forever"))])
        agent = Agent(engine, RENDERER, get_parser("hermes"), tools(forever=forever))
        prepare = forever if where == "prepare" else None
        task = asyncio.create_task(run_episode(agent, PROMPT, task_id="t1", prepare=prepare))
        await asyncio.sleep(0.05)
        task.cancel()
        episode = await task
        assert len(asyncio.all_tasks()) == 1
        return episode, engine

    episode, engine = asyncio.run(run())
    assert episode.outcome is Outcome.ABORTED
    assert not episode.trajectories
    assert cleaned == [where]
    assert engine.released == ["t1#0"]
    assert engine.in_flight == 0


def test_a_release_that_fails_is_counted_and_harms_nothing():
    class Engine(ScriptedEngine):
        async def release(self, session):
            raise EngineError("closed")

    agent = Agent(Engine([say("done")]), RENDERER, get_parser("hermes"))
    episode = asyncio.run(run_episode(agent, PROMPT, task_id="t1"))
    assert episode.outcome is Outcome.COMPLETED
    assert episode.counters["release_failures"] == 1


def test_malformed_calls_reach_the_model_where_results_need_a_visible_call():
    """Gemma's template knows tool results only after a call that it can see, and a malformed one can't be seen."""
    renderer = ChatRenderer(codec("byte_level"), templates()["gemma4"])
    end = renderer.end_id(before_answer=True)
    replies = [Reply([*renderer.codec.encode_plain(call("ping", "[1]")), end]), Reply([5, end])]
    episode, engine = play(replies, {"ping": pong}, renderer=renderer)
    assert episode.outcome is Outcome.COMPLETED, episode.error
    assert "must be a JSON object" in renderer.codec.decode(engine.requests[1].prompt)
