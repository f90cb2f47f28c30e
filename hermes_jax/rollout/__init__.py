"""One episode: chat rendering in tokens, tool-call parsers, agent loop, environments, rewards, groups."""

from hermes_jax.rollout.agent import Agent, EpisodeLimits
from hermes_jax.rollout.agent_loop import WITHOUT_TRAJECTORIES, run_episode
from hermes_jax.rollout.chat import ChatRenderer
from hermes_jax.rollout.codec import HFCodec, TextCodec, placeholder_ids
from hermes_jax.rollout.collect import Collector, Gate, collect_group, collect_groups
from hermes_jax.rollout.environment import Environment, Reward, load_environment
from hermes_jax.rollout.parsers import ParsedTurn, ToolCall, get_parser
from hermes_jax.rollout.rewards import RewardFunction
from hermes_jax.rollout.scripted import demonstration_episode
from hermes_jax.rollout.template import TemplateError
from hermes_jax.rollout.template_check import TemplateReport, check_prompt, examine
from hermes_jax.rollout.tool_prompt import tool_system_prompt
from hermes_jax.rollout.transcript import Transcript

__all__ = [
    "WITHOUT_TRAJECTORIES",
    "Agent",
    "ChatRenderer",
    "Collector",
    "Environment",
    "EpisodeLimits",
    "Gate",
    "HFCodec",
    "ParsedTurn",
    "Reward",
    "RewardFunction",
    "TemplateError",
    "TemplateReport",
    "TextCodec",
    "ToolCall",
    "Transcript",
    "check_prompt",
    "collect_group",
    "collect_groups",
    "demonstration_episode",
    "examine",
    "get_parser",
    "load_environment",
    "placeholder_ids",
    "run_episode",
    "tool_system_prompt",
]
