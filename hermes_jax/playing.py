"""From the config to what plays episodes: environment, tools, sandboxes, agent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hermes_jax.assembly import Policy
from hermes_jax.config import Config, ConfigError
from hermes_jax.data.seeds import fold_seed
from hermes_jax.data.trajectory import Episode
from hermes_jax.engines.base import TokenEngine
from hermes_jax.rollout.agent import Agent, EpisodeLimits
from hermes_jax.rollout.chat import ChatRenderer
from hermes_jax.rollout.collect import Collector, Gate
from hermes_jax.rollout.environment import Environment, call, load_environment
from hermes_jax.rollout.parsers import get_parser
from hermes_jax.rollout.scripted import demonstration_episode
from hermes_jax.rollout.template_check import check_prompt, examine
from hermes_jax.rollout.tool_prompt import tool_system_prompt
from hermes_jax.tools.backends import SandboxSettings, check_backend
from hermes_jax.tools.context import ToolContext, make_context
from hermes_jax.tools.registry import Tool, resolve_toolsets
from hermes_jax.tools.worker import WorkerServer

TOOLS_PLACEHOLDER = "{tools}"
"""In `env.system_prompt` this stands for the tools and how to call them: for chat templates that don't show tools."""


@dataclass(frozen=True, eq=False)
class Players:
    """What all episodes of a run share.

    Args:
        config, environment, tools, renderer: of the run.
        worker: server that runs sandboxes and reward functions.
        gate: bounds the episodes that run at once.
        policy: whom they play.
        notes: lines for people, about the chat template and the environment.
    """

    config: Config
    environment: Environment
    tools: Mapping[str, Tool]
    renderer: ChatRenderer
    worker: WorkerServer
    gate: Gate
    policy: Policy
    notes: tuple[str, ...]

    def collector(self, engine: TokenEngine, temperature: float) -> Collector:
        """Plays episodes at a temperature; 0 = greedy."""
        env = self.config.env
        agent = Agent(
            engine=engine,
            renderer=self.renderer,
            parser=get_parser(env.tool_call_parser),
            tools=self.tools,
            limits=EpisodeLimits(
                max_turns=env.max_agent_turns,
                max_new_tokens=env.max_token_length,
                max_total_new_tokens=env.max_episode_tokens,
                context_limit=self.config.model.context_length,
                episode_timeout_s=env.episode_timeout,
                tool_timeout_s=env.terminal_timeout + 5.0,  # the sandbox's own deadline comes first
                tool_output_limit_bytes=env.tool_output_limit,
            ),
            temperature=temperature,
            forbidden_ids=frozenset(np.flatnonzero(self.policy.banned).tolist()),
            vocab_size=self.policy.config.vocab_size,
        )
        return Collector(agent, self.environment, self._context, self.gate, env.reward_timeout, self.worker)

    def demonstrations(self, step: int, count: int) -> list[Episode]:
        """Scripted episodes of one warm-start step; a function of (seed, step)."""
        episodes: list[Episode] = []
        for place in range(count):
            seed = fold_seed(self.config.seed, "warm_start", step, place)
            item = self.environment.train_item(seed % 2**32)
            for messages in self.environment.demonstrate(item, seed):
                prompt = self.environment.messages(item)
                system = [m for m in prompt if m["role"] == "system"]
                episodes.append(demonstration_episode(self.renderer, [*system, *messages], task_id=str(seed)))
        return episodes

    def _context(self, task_id: str, member: int) -> ToolContext:
        env = self.config.env
        return make_context(
            self.worker,
            SandboxSettings(backend=env.terminal_backend),
            terminal_timeout_s=env.terminal_timeout,
            output_limit_bytes=env.tool_output_limit,
        )


@dataclass(frozen=True, eq=False)
class Stage:
    """What can be made, and found wrong, before there is a policy."""

    config: Config
    environment: Environment
    tools: Mapping[str, Tool]
    worker: WorkerServer


async def open_stage(config: Config, worker: WorkerServer) -> Stage:
    """Environment and tools of the config; the sandbox backend is tried.

    Raises:
        BackendUnavailable: sandboxes don't work here; says which command mends that.
        ConfigError: unknown environment, toolset or parser, or a warm start that has nothing to imitate.
    """
    env = config.env
    await asyncio.to_thread(check_backend, env.terminal_backend)
    with _naming("env.name or env.options"):
        environment = load_environment(env.name, env.options)
    with _naming("env.enabled_toolsets or env.disabled_toolsets"):
        tools = resolve_toolsets(env.enabled_toolsets, env.disabled_toolsets or ())
    with _naming("env.tool_call_parser"):
        get_parser(env.tool_call_parser)
    await call(environment.setup)
    if config.warm_start.steps and not environment.demonstrate(environment.train_item(0), 0):
        raise ConfigError(
            f"warm_start.steps is {config.warm_start.steps}, but environment {environment.name} has no scripted "
            "episodes (Environment.demonstrate); set warm_start.steps to 0"
        )
    return Stage(config, environment, tools, worker)


@contextmanager
def _naming(option: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def open_players(stage: Stage, policy: Policy) -> Players:
    """What plays the policy; its chat template and the first prompts are examined.

    Raises:
        TemplateError: the chat template can't be used, hides the tools, or a prompt doesn't fit into the context.
        ConfigError: the context is longer than the model's.
    """
    config, environment = stage.config, stage.environment
    if config.model.context_length > policy.config.max_length:
        raise ConfigError(
            f"model.context_length is {config.model.context_length}, but {policy.folder} was made for "
            f"{policy.config.max_length} positions (max_position_embeddings); lower model.context_length"
        )
    schemas = [tool.schema() for tool in stage.tools.values()]
    environment.system_prompt = system_prompt(config, environment, schemas)
    renderer = ChatRenderer(
        policy.tokenizer,
        template_arguments=config.model.template_arguments,
        tools=schemas,
        stop_ids=policy.stop_ids,
    )
    notes = examine(renderer).lines()
    for item in [environment.train_item(0), *list(environment.eval_items())[:1]]:
        check_prompt(renderer, environment.messages(item), config.model.context_length)
    if config.env.terminal_backend == "local":
        notes.append(
            "env.terminal_backend is local: commands that the model writes run on this machine as you, in no sandbox"
        )
    if config.env.eval_episodes and not environment.eval_items():
        notes.append(f"environment {environment.name} has no held-out tasks (eval_items): there will be no evaluation")
    if environment.uses_wall_clock:
        notes.append(
            f"environment {environment.name}: its reward uses wall-clock time, so a run can't be reproduced exactly, "
            "neither by repeating nor by resuming it"
        )
    gate = Gate(config.max_concurrent_episodes)
    return Players(config, environment, stage.tools, renderer, stage.worker, gate, policy, tuple(notes))


def system_prompt(config: Config, environment: Environment, schemas: list[dict[str, Any]]) -> str | None:
    """The system prompt, with an explanation of the tools in place of `{tools}`."""
    text = config.env.system_prompt if config.env.system_prompt is not None else environment.system_prompt
    if text is None or TOOLS_PLACEHOLDER not in text:
        return text
    syntax = get_parser(config.env.tool_call_parser).syntax
    return text.replace(TOOLS_PLACEHOLDER, tool_system_prompt(schemas, syntax))
