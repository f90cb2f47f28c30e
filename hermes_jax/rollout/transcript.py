"""What the engine saw and sampled, token by token: the one place where a token gets its mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hermes_jax.data.trajectory import Trajectory
from hermes_jax.rollout.chat import ChatRenderer, Message
from hermes_jax.rollout.parsers.base import ParsedTurn
from hermes_jax.rollout.reply_forms import Messages, Reply, answers_as_user
from hermes_jax.rollout.template import Rendered, TemplateError


@dataclass
class _Sequence:
    """One trajectory in the making. `text` is what its ids say."""

    text: str
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fill()

    def add(self, text: str, tokens: Sequence[int]) -> None:
        """Adds tokens that were not sampled."""
        self.text += text
        self.tokens += tokens
        self._fill()

    def _fill(self) -> None:
        missing = len(self.tokens) - len(self.turn)
        self.logprobs += [0.0] * missing
        self.versions += [-1] * missing
        self.turn += [-1] * missing

    def trajectory(self, temperature: float) -> Trajectory | None:
        """Up to the last sampled token (what follows it trains nothing); None if nothing was sampled."""
        turn = np.array(self.turn)
        end = int(np.flatnonzero(turn >= 0).max(initial=-1)) + 1
        if not end:
            return None
        mask = turn[:end] >= 0
        return Trajectory(
            tokens=np.array(self.tokens[:end]),
            mask=mask,
            logprobs=np.array(self.logprobs[:end]),
            temperature=np.where(mask, temperature, 1.0),
            policy_version=np.array(self.versions[:end]),
            turn=turn[:end],
        )


class Transcript:
    """A conversation that grows: prompts for the engine, and the trajectories that come of it.

    Args:
        renderer: renders the conversation.
        messages: what stands before the model's first turn.

    Raises:
        TemplateError: the chat template refuses the messages.
    """

    def __init__(self, renderer: ChatRenderer, messages: Sequence[Message]) -> None:
        self._renderer = renderer
        self._history = [dict(m) for m in messages]
        self._done: list[_Sequence] = []
        self._current = self._begin(renderer.render(self._history))
        self._reply: list[int] = []

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """What the engine is conditioned on next: all ids so far."""
        return tuple(self._current.tokens)

    @property
    def text(self) -> str:
        """What the prompt says."""
        return self._current.text

    @property
    def rewrites(self) -> int:
        """How often the template rewrote history, so that a new trajectory began."""
        return len(self._done)

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], turn: int) -> None:
        """Adds ids exactly as sampled; several times in a turn that was sampled in parts."""
        current = self._current
        self._reply += ids
        current.tokens += ids
        current.logprobs += logprobs
        current.versions += versions
        current.turn += [turn] * len(ids)

    def reply_text(self) -> str:
        """Text of the turn sampled last, decoded as a whole, without its end marker."""
        return self._decode(self._renderer.without_stop(self._reply))

    def extend(self, turn: ParsedTurn, answers: Sequence[Message]) -> None:
        """Closes the model's turn and adds the messages that answer it, ready for the next turn.

        Where the template renders all so far as it stands, the ids so far are kept and those of the new text added.
        Where it rewrites history, a new trajectory begins with what the template makes of the conversation.

        Raises:
            TemplateError: the template refuses the conversation in every form that the reply can be given.
        """
        current, text = self._current, self._current.text + self._decode(self._reply)
        reply = Reply(self.reply_text(), turn, [dict(m) for m in answers], self._renderer.conventions.prefill)
        rendered = self._render(reply, text)
        if rendered.text.startswith(text):
            added = rendered.after(len(text))
            current.text = text
            current.add(added.text, self._renderer.encode(added, after=current.tokens[-1]))
        else:
            self._done.append(current)
            self._current = self._begin(rendered)
        self._reply = []

    def _render(self, reply: Reply, text: str) -> Rendered:
        """The first rendering that starts with `text`, else the first that the template accepts; remembers its form."""
        accepted: list[tuple[Messages, Rendered]] = []
        refused: list[TemplateError] = []
        for form in self._renderer.conventions.forms:
            if (messages := form(reply)) is None or (accepted and form is answers_as_user):
                continue
            history = [*self._history, *messages]
            try:
                accepted.append((history, self._renderer.render(history)))
            except TemplateError as error:
                refused.append(error)
                continue
            if accepted[-1][1].text.startswith(text):
                accepted = accepted[-1:]
                break
        if not accepted:
            raise (
                refused[0] if refused else TemplateError("the chat template shows no form of a reply with tool results")
            )
        self._history, rendered = accepted[0]
        return rendered

    def trajectories(self, temperature: float) -> tuple[Trajectory, ...]:
        """Every sampled id once, each in the context in which it was sampled."""
        made = (sequence.trajectory(temperature) for sequence in (*self._done, self._current))
        return tuple(trajectory for trajectory in made if trajectory is not None)

    def _begin(self, rendered: Rendered) -> _Sequence:
        return _Sequence(rendered.text, self._renderer.encode(rendered))

    def _decode(self, ids: Sequence[int]) -> str:
        before = len(self._current.tokens) - len(self._reply)
        return self._renderer.codec.decode(ids, after=self._current.tokens[before - 1] if before else None)
