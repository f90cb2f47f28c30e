"""What a person writes to train an agent on something new: tasks, prompts, the sandbox's first state, rewards."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_jax.data.trajectory import Episode
from hermes_jax.rollout.chat import Message
from hermes_jax.rollout.rewards import RewardFunction

Item = Mapping[str, Any]


@dataclass(frozen=True)
class Reward:
    """What an episode was worth, in detail.

    Args:
        total: the reward; None = no opinion.
        parts: by name, for the log.
        success: solved or not; None = unknown.
        turn_rewards: reward per model turn, where the environment gives any.
    """

    total: float | bool | None
    parts: Mapping[str, float | bool | None] = field(default_factory=dict)
    success: bool | None = None
    turn_rewards: Sequence[float] = ()


class Environment:
    """Base class of environments. A subclass in `envs/<name>/env.py` is found by that name.

    Methods that do work may be `async` or not; those that aren't run in a thread, so that they never hold up decoding
    (`compute_reward`: in the worker server, where its deadline ends even a busy loop).
    The tasks must be a function of their number: then one integer says where a run is in them.

    Args:
        settings: the environment's own options (`env.options`).
    """

    name = ""
    system_prompt: str | None = None
    reward_functions: Sequence[RewardFunction] = ()
    """Instead of `compute_reward`: functions that look at the messages only. They run in the worker server, where a
    deadline ends even a busy loop."""
    uses_wall_clock: bool = False
    """Whether rewards depend on what time it is or how long something took: then no run can be reproduced exactly, and
    the trainer says so."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.settings = dict(settings or {})
        self.cursor = 0

    def setup(self) -> Any:
        """Loads what the tasks need; called once, before anything else."""

    def train_item(self, index: int) -> Item:
        """Training task number `index`, from 0 without end: the same at every call."""
        raise NotImplementedError(f"{type(self).__name__} must define train_item(index)")

    def eval_items(self) -> Sequence[Item]:
        """The held-out tasks, always in the same order. None by default."""
        return ()

    def get_next_item(self) -> Item:
        """The training task at `cursor`, which moves on."""
        self.cursor += 1
        return self.train_item(self.cursor - 1)

    def task_id(self, item: Item) -> str:
        """Names a task: its "id" or "task_id", or a hash of it."""
        for key in ("id", "task_id"):
            if key in item:
                return str(item[key])
        return hashlib.blake2b(json.dumps(item, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()

    def format_prompt(self, item: Item) -> str | Sequence[Message]:
        """What the policy is told: the user's words, or whole messages."""
        raise NotImplementedError(f"{type(self).__name__} must define format_prompt(item)")

    def prepare(self, item: Item, messages: list[dict[str, Any]], ctx: Any) -> Any:
        """Puts the sandbox into the task's first state. Counts for the episode's deadline.

        Args:
            messages: a copy of the prompt of this one episode.
            ctx: the episode's ToolContext.

        Returns:
            Other messages for this episode, or None.
        """

    @property
    def prepares(self) -> bool:
        """Whether it has a `prepare` of its own."""
        return type(self).prepare is not Environment.prepare

    def compute_reward(self, item: Item, episode: Episode, ctx: Any) -> Any:
        """What an episode was worth: a number or bool, a `Reward` with parts, or None for no opinion.

        An `async` function has the sandbox at hand and must leave heavy computing to others, for it shares the
        trainer's event loop. A plain one runs in another process, on a copy of this object (which travels with every
        call: `__getstate__` can leave large tables out); what it changes is lost.

        Args:
            ctx: the episode's ToolContext, with files and processes as the policy left them; None for a plain function.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_reward(item, episode, ctx)")

    def demonstrate(self, item: Item, seed: int) -> Sequence[Sequence[Message]]:
        """Scripted conversations for a task, good or bad, as the warm start imitates them; none by default."""
        return ()

    def messages(self, item: Item) -> list[dict[str, Any]]:
        """The prompt of a task as messages, the system prompt first if there is one."""
        prompt = self.format_prompt(item)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if self.system_prompt and not (messages and messages[0].get("role") == "system"):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that may be async; one that isn't runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result = await asyncio.to_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result


def load_environment(name: str, settings: Mapping[str, Any] | None = None) -> Environment:
    """Makes the environment of `envs/<name>/env.py`: the subclass of `Environment` that is defined there.

    Raises:
        ValueError: there is no such environment (the message lists those there are), not exactly one class in it, or
            settings for a class that has no `__init__` to take them.
    """
    module_name = f"envs.{name}.env"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        near = difflib.get_close_matches(name, _available(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        known = ", ".join(_available()) or "none"
        raise ValueError(f"there is no envs/{name}/env.py{hint}; environments: {known}") from None
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Environment) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        found = ", ".join(c.__name__ for c in classes) or "none"
        raise ValueError(f"envs/{name}/env.py must define one subclass of Environment, it defines {found}")
    if settings and classes[0].__init__ is Environment.__init__:
        raise ValueError(f"environment {name} takes no options, got {', '.join(settings)}")
    environment = classes[0](settings)
    environment.name = environment.name or name
    return environment


def _available() -> list[str]:
    try:
        package = importlib.import_module("envs")
    except ModuleNotFoundError:
        return []
    return sorted({file.parent.name for place in package.__path__ for file in Path(place).glob("*/env.py")})
