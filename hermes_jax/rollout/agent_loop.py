"""One episode: the model's turns, its tool calls and their results, until it is done or a limit is reached."""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hermes_jax.data.seeds import fold_seed
from hermes_jax.data.trajectory import Episode, Outcome, Trajectory
from hermes_jax.engines.base import EngineError, Sampling
from hermes_jax.rollout.agent import Agent
from hermes_jax.rollout.chat import Message
from hermes_jax.rollout.codec import placeholder_ids
from hermes_jax.rollout.completions import check_completion, without_padding
from hermes_jax.rollout.deadline import DeadlinePassed, before
from hermes_jax.rollout.parsers.base import ParsedTurn, ToolCall
from hermes_jax.rollout.reply_forms import openai_calls
from hermes_jax.rollout.template import TemplateError
from hermes_jax.rollout.tool_calls import INFRASTRUCTURE, ToolRunner
from hermes_jax.rollout.transcript import Transcript

WITHOUT_TRAJECTORIES = (Outcome.ABORTED, Outcome.ERROR, Outcome.ENV_ERROR)
"""Outcomes that say nothing about the policy: such an episode keeps its messages, but nothing that could train."""

Prepare = Callable[[list[dict[str, Any]]], Awaitable[Sequence[Message] | None]]
"""Gets an own copy of the messages, puts the sandbox into its first state, and may return other messages."""


async def run_episode(
    agent: Agent,
    messages: Sequence[Message],
    ctx: Any = None,
    *,
    task_id: str,
    member: int = 0,
    seed: int = 0,
    session: str | None = None,
    prepare: Prepare | None = None,
) -> Episode:
    """Plays one episode; run it in a task of its own.

    Never raises for what an engine, a tool, a template or an environment does: that is the episode's outcome.
    Cancelling the task ends the episode with outcome `aborted`.

    Args:
        messages: the conversation before the model's first turn; not changed.
        ctx: the episode's ToolContext, for its tools. It stays open: the reward function needs it.
        task_id, member: whose episode it is.
        seed: its turns are sampled with seeds folded from this one.
        session: names the episode to the engine; None = made of task and member.
        prepare: see `Prepare`; counts for the episode's deadline.
    """
    play = _Play(agent, ctx, session or f"{task_id}#{member}", seed, f"task {task_id}, member {member}")
    outcome, error = await play.run([dict(copy.deepcopy(m)) for m in messages], prepare)
    trajectories: tuple[Trajectory, ...] = ()
    if play.transcript and agent.trains and outcome not in WITHOUT_TRAJECTORIES:
        trajectories = play.transcript.trajectories(agent.temperature)
    play.counters[outcome.value] += 1
    return Episode(
        task_id=task_id,
        member=member,
        trajectories=trajectories,
        outcome=outcome,
        messages=tuple(play.messages),
        timings=dict(play.timings),
        counters=dict(play.counters),
        error=error,
    )


class _Ended(Exception):
    """The episode is over."""

    def __init__(self, outcome: Outcome, error: str | None = None) -> None:
        super().__init__(outcome, error)
        self.outcome, self.error = outcome, error


class _Play:
    """The state of one episode while it is played."""

    def __init__(self, agent: Agent, ctx: Any, session: str, seed: int, name: str) -> None:
        self.agent, self.session, self.seed, self.name = agent, session, seed, name
        self.transcript: Transcript | None = None
        self.messages: list[Mapping[str, Any]] = []
        self.counters: Counter[str] = Counter()
        self.timings: defaultdict[str, float] = defaultdict(float)
        self.deadline = agent.clock.now() + agent.limits.episode_timeout_s
        limits = agent.limits
        self.runner = ToolRunner(
            agent.tools, ctx, agent.clock, limits.tool_timeout_s, limits.tool_output_limit_bytes, agent.parser.syntax
        )
        codec = agent.renderer.codec
        self.forbidden = agent.forbidden_ids | placeholder_ids(codec)
        pad = codec.added.get(codec.special_tokens.get("pad_token", ""))
        self.pad_id = pad.id if pad else None

    async def run(self, messages: list[dict[str, Any]], prepare: Prepare | None) -> tuple[Outcome, str | None]:
        """Plays to the end, whatever ends it."""
        try:
            with self.phase("total"):
                await self._prepare(messages, prepare)
                return await self._turns()
        except _Ended as end:
            return end.outcome, end.error
        except DeadlinePassed:
            return Outcome.TIMEOUT, f"{self.name}: no end within {self.agent.limits.episode_timeout_s:g} s"
        except asyncio.CancelledError:
            return Outcome.ABORTED, f"{self.name}: cancelled"
        except INFRASTRUCTURE as error:
            return Outcome.ENV_ERROR, f"{self.name}: {type(error).__name__}: {error}"
        except (EngineError, TemplateError) as error:
            return Outcome.ERROR, f"{self.name}: {error}"
        except Exception as error:
            return Outcome.ERROR, f"{self.name}: {type(error).__name__}: {error}"
        finally:
            await self._release()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to a timing."""
        start = self.agent.clock.now()
        try:
            yield
        finally:
            self.timings[name] += self.agent.clock.now() - start

    async def _prepare(self, messages: list[dict[str, Any]], prepare: Prepare | None) -> None:
        self.messages = list(messages)
        if prepare is not None:
            with self.phase("sandbox"):
                try:
                    given = await before(self.deadline, self.agent.clock, _prepared(prepare, messages))
                except (DeadlinePassed, asyncio.CancelledError):
                    raise
                except Exception as error:
                    raise _Ended(Outcome.ENV_ERROR, f"{self.name}: {type(error).__name__}: {error}") from error
            if given is not None:
                self.messages = [dict(m) for m in given]
        self.transcript = Transcript(self.agent.renderer, self.messages)

    async def _turns(self) -> tuple[Outcome, str | None]:
        transcript, agent = self.transcript, self.agent
        assert transcript is not None
        for turn in range(agent.limits.max_turns):
            finish = await self._sample(transcript, turn)
            self.counters["turns"] += 1
            opened = agent.renderer.conventions.opens_thinking
            parsed = agent.parser.parse(transcript.reply_text(), agent.renderer.tools, thinking_open=opened)
            parsed = _with_ids(parsed, turn)
            self.messages.append(_assistant_message(parsed))
            if finish == "length":
                return Outcome.LENGTH, None
            if not parsed.entries:
                return Outcome.COMPLETED, None
            results = await self._answers(parsed, turn)
            if turn + 1 < agent.limits.max_turns:
                transcript.extend(parsed, results)
                self.counters["history_rewrites"] = transcript.rewrites
        return Outcome.MAX_TURNS, None

    async def _sample(self, transcript: Transcript, turn: int) -> str:
        """Samples one turn, in parts where the engine breaks off and may go on. Returns the finish reason."""
        limits = self.agent.limits
        turn_left, part = limits.max_new_tokens, 0
        while True:
            prompt = transcript.prompt_ids
            budget = self._budget(len(prompt), turn_left, part)
            if budget <= 0:
                return "length"
            n_sampled, finish = await self._ask(transcript, prompt, budget, turn, part)
            if finish != "abort":
                self.counters["empty_turns"] += part == 0 and n_sampled == 0
                return finish
            if not limits.resume_partial or (part and not n_sampled):
                raise _Ended(Outcome.ABORTED, f"{self.name}: the engine broke off turn {turn}")
            turn_left = None if turn_left is None else turn_left - n_sampled
            part += 1
            self.counters["resumed_replies"] += 1

    def _budget(self, prompt_length: int, turn_left: int | None, part: int) -> int:
        """Tokens that the next reply may have; ends the episode where there is no room for one."""
        limits = self.agent.limits
        room = limits.context_limit - prompt_length
        total = limits.max_total_new_tokens
        left = math.inf if total is None else total - self.counters["sampled_tokens"]
        if part == 0 and room <= 0:
            detail = f"{prompt_length} tokens of prompt, the context holds {limits.context_limit}"
            raise _Ended(Outcome.CONTEXT_FULL, f"{self.name}: {detail}")
        if part == 0 and left <= 0:
            raise _Ended(Outcome.LENGTH)
        return int(min(room, left, math.inf if turn_left is None else turn_left))

    async def _ask(
        self, transcript: Transcript, prompt: tuple[int, ...], budget: int, turn: int, part: int
    ) -> tuple[int, str]:
        agent, request_id = self.agent, f"{self.session}/turn {turn}" + (f", part {part}" if part else "")
        sampling = Sampling(
            max_tokens=budget,
            temperature=agent.temperature,
            stop_ids=agent.renderer.stop_ids,
            seed=fold_seed(self.seed, turn, part),
            top_p=agent.top_p,
            top_k=agent.top_k,
            min_p=agent.min_p,
        )
        with self.phase("model"):
            asked = agent.engine.generate(prompt, sampling, session=self.session, request_id=request_id)
            reply = await before(self.deadline, agent.clock, asked)
        reply = without_padding(reply, agent.renderer.stop_ids, self.pad_id)
        check_completion(
            reply,
            request_id=request_id,
            max_tokens=budget,
            vocab_size=agent.vocab_size or agent.renderer.codec.vocab_size,
            forbidden=self.forbidden,
        )
        transcript.add_sampled(reply.token_ids, reply.logprobs, reply.versions, turn)
        self.counters["sampled_tokens"] += len(reply.token_ids)
        self.counters["prompt_tokens"] += len(prompt)
        finish = reply.finish_reason
        if finish == "abort" and agent.limits.resume_partial and set(reply.token_ids[-1:]) & set(sampling.stop_ids):
            finish = "stop"  # broken off when all was said: nothing may be sampled after an end
        return len(reply.token_ids), finish

    async def _answers(self, parsed: ParsedTurn, turn: int) -> list[Message]:
        """Runs the calls of a turn in their order; one tool message for each, malformed ones too."""
        results: list[Message] = []
        for number, entry in enumerate(parsed.entries):
            with self.phase("tools"):
                answer = await self.runner.answer(entry, self.deadline)
            self.counters["tool_calls"] += answer.failed not in ("malformed", "unknown")
            for kind, counter in _COUNTERS.items():
                self.counters[counter] += answer.failed == kind
            message: dict[str, Any] = {
                "role": "tool",
                "tool_call_id": _call_id(turn, number),
                "content": answer.content,
            }
            if isinstance(entry, ToolCall):
                message["name"] = entry.name
            results.append(message)
            self.messages.append(message)
            if answer.failed == "timeout" and self.agent.limits.end_on_tool_timeout:
                raise _Ended(Outcome.TOOL_TIMEOUT)
        return results

    async def _release(self) -> None:
        """Gives the engine's cache of this episode back. An engine that can't has said so in other ways."""
        try:
            await asyncio.shield(asyncio.ensure_future(self.agent.engine.release(self.session)))
        except (Exception, asyncio.CancelledError):
            self.counters["release_failures"] += 1


_COUNTERS = {
    "malformed": "malformed_calls",
    "unknown": "unknown_tools",
    "error": "tool_errors",
    "timeout": "tool_timeouts",
}


async def _prepared(prepare: Prepare, messages: list[dict[str, Any]]) -> Sequence[Message] | None:
    return await prepare(copy.deepcopy(messages))


def _call_id(turn: int, number: int) -> str:
    """Nine letters and digits, as the strictest templates want them; no two alike in an episode."""
    return f"call{turn:03d}{number:02d}"


def _with_ids(parsed: ParsedTurn, turn: int) -> ParsedTurn:
    """The turn with call ids that differ in the whole episode."""
    entries = tuple(
        ToolCall(entry.name, entry.arguments, _call_id(turn, number)) if isinstance(entry, ToolCall) else entry
        for number, entry in enumerate(parsed.entries)
    )
    return ParsedTurn(parsed.content, entries, parsed.reasoning)


def _assistant_message(parsed: ParsedTurn) -> dict[str, Any]:
    """The turn for people, in OpenAI form."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = openai_calls(parsed.calls)
    return message
