"""From the config to what plays episodes: environment, tools, sandboxes, agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hermes_jax.assembly import Policy
from hermes_jax.config import Config
from hermes_jax.data.seeds import fold_seed
from hermes_jax.data.trajectory import Episode
from hermes_jax.engines.base import TokenEngine
from hermes_jax.rollout.agent import Agent, EpisodeLimits
from hermes_jax.rollout.chat import ChatRenderer
from hermes_jax.rollout.collect import Collector, Gate
from hermes_jax.rollout.environment import Environment, load_environment
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
    """

    config: Config
    environment: Environment
    tools: Mapping[str, Tool]
    renderer: ChatRenderer
    worker: WorkerServer
    gate: Gate
    policy: Policy

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
                tool_output_limit_chars=env.tool_output_limit,
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


def open_players(config: Config, policy: Policy, worker: WorkerServer) -> Players:
    """Environment, tools and renderer of the config; the sandbox backend is tried.

    Raises:
        BackendUnavailable: sandboxes don't work here; says which command mends that.
        ValueError: unknown environment, toolset or parser.
        TemplateError: the chat template can't be used, hides the tools, or the first prompt doesn't fit.
    """
    check_backend(config.env.terminal_backend)
    environment = load_environment(config.env.name, config.env.options)
    environment.setup()
    tools = resolve_toolsets(config.env.enabled_toolsets, config.env.disabled_toolsets or ())
    schemas = [tool.schema() for tool in tools.values()]
    environment.system_prompt = system_prompt(config, environment, schemas)
    renderer = ChatRenderer(
        policy.tokenizer,
        template_arguments=config.model.template_arguments,
        tools=schemas,
        stop_ids=policy.stop_ids,
    )
    examine(renderer)
    check_prompt(renderer, environment.messages(environment.train_item(0)), config.model.context_length)
    return Players(config, environment, tools, renderer, worker, Gate(config.max_concurrent_episodes), policy)


def system_prompt(config: Config, environment: Environment, schemas: list[dict[str, Any]]) -> str | None:
    """The system prompt, with an explanation of the tools in place of `{tools}`."""
    text = config.env.system_prompt if config.env.system_prompt is not None else environment.system_prompt
    if text is None or TOOLS_PLACEHOLDER not in text:
        return text
    syntax = get_parser(config.env.tool_call_parser).syntax
    return text.replace(TOOLS_PLACEHOLDER, tool_system_prompt(schemas, syntax))
