"""Tables: other names of options, options that Hermes had, and when an option has no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hermes_jax.config.blocks_learn import OutcomePolicy
from hermes_jax.config.fields import Block, block_type
from hermes_jax.config.schema import Config

ALIASES: dict[str, str] = {
    "grpo.epsilon_clip": "grpo.clip_low",
    "grpo.epsilon_clip_upper": "grpo.clip_high",
    "env.worker_timeout": "env.episode_timeout",
    "env.task_timeout": "env.episode_timeout",
    "env.test_timeout": "env.reward_timeout",
    "env.max_concurrent_tasks": "env.max_concurrent_episodes",
    "env.use_wandb": "logging.wandb",
    "env.wandb_name": "logging.wandb_name",
    "tinker.learning_rate": "optimizer.learning_rate",
    "tinker.save_checkpoint_interval": "checkpoint.every_steps",
}
"""Keys of Hermes' documentation and YAML files -> our name for the same option."""

GONE: dict[str, str] = {
    "env.tokenizer_name": "the tokenizer comes with the model: remove the key and set model.path",
    "env.ensure_scores_are_not_same": "remove the key: a group of equal rewards gets advantage 0 and is counted",
    "env.tool_pool_size": "remove the key: env.max_concurrent_episodes bounds the tools as well",
    "env.distribution": "list the toolsets in env.enabled_toolsets",
    "env.max_batches_offpolicy": "remove the key: each step trains on episodes of its own policy",
    "env.batch_size": "set env.groups_per_step (episodes per step = env.group_size * env.groups_per_step)",
    "env.inference_weight": "remove the key: a run has one environment",
    "env.eval_handling": "remove the key: training waits while an evaluation runs",
    "env.include_messages": "remove the key: logging.save_episodes saves messages",
    "env.rollout_server_url": "remove the key: environments run inside the trainer",
    "env.dataset_name": "put it under env.options if the environment reads a data set",
    "env.dataset_split": "put it under env.options if the environment reads a data set",
    "env.prompt_field": "put it under env.options if the environment reads a data set",
    "openai.health_check": "remove the key: the embedded engine lives in the trainer's process",
}
"""Keys of Hermes' YAML files without a counterpart -> what to do instead."""


@dataclass(frozen=True)
class Use:
    """Options that have an effect only under a condition.

    Args:
        options: dotted paths; `block.*` = all of a block but the switches.
        when: they have an effect in this configuration.
        switches: the options that decide it.
        reason: why they have none otherwise.
    """

    options: tuple[str, ...]
    when: Callable[[Config], bool]
    switches: tuple[str, ...]
    reason: str


USES: tuple[Use, ...] = (
    Use(
        ("grpo.kl_kind", "grpo.kl_in"),
        lambda c: c.grpo.beta > 0,
        ("grpo.beta",),
        "grpo.beta is 0, so there is no KL term",
    ),
    Use(
        ("grpo.head_chunk",),
        lambda c: c.grpo.use_liger_loss,
        ("grpo.use_liger_loss",),
        "grpo.use_liger_loss is false, so there is one chunk",
    ),
    Use(
        ("grpo.objective",),
        lambda c: c.grpo.policy_loss is None,
        ("grpo.policy_loss",),
        "grpo.policy_loss is a loss of your own, which takes its place",
    ),
    Use(
        ("grpo.log_ratio_clamp",),
        lambda c: c.grpo.objective != "reinforce" or c.grpo.policy_loss is not None,
        ("grpo.objective", "grpo.policy_loss"),
        "grpo.objective is reinforce, which has no ratio",
    ),
    Use(
        ("grpo.clip_low", "grpo.clip_high"),
        lambda c: c.grpo.objective not in ("reinforce", "sapo", "dppo") or c.grpo.policy_loss is not None,
        ("grpo.objective", "grpo.policy_loss"),
        "grpo.objective is reinforce, sapo or dppo, and no ratio is clipped",
    ),
    Use(
        ("grpo.dual_clip",),
        lambda c: c.grpo.objective == "clip" or c.grpo.policy_loss is not None,
        ("grpo.objective", "grpo.policy_loss"),
        "grpo.objective is not clip, and no ratio is clipped twice",
    ),
    Use(
        ("grpo.tau_pos", "grpo.tau_neg"),
        lambda c: c.grpo.objective == "sapo" or c.grpo.policy_loss is not None,
        ("grpo.objective", "grpo.policy_loss"),
        "grpo.objective is not sapo, so there is no gate",
    ),
    Use(
        ("grpo.tv_max",),
        lambda c: c.grpo.objective == "dppo" or c.grpo.policy_loss is not None,
        ("grpo.objective", "grpo.policy_loss"),
        "grpo.objective is not dppo, so nothing is masked by probability",
    ),
    Use(
        ("grpo.pass_k",),
        lambda c: c.grpo.advantage == "pass_at_k",
        ("grpo.advantage",),
        "grpo.advantage is not pass_at_k",
    ),
    Use(
        ("grpo.correction_low",),
        lambda c: "mask" in c.grpo.correction,
        ("grpo.correction",),
        "grpo.correction does not mask, so there is no lower bound",
    ),
    Use(
        ("grpo.correction_high",),
        lambda c: c.grpo.correction != "none",
        ("grpo.correction",),
        "grpo.correction is none",
    ),
    Use(
        ("grpo.overlong_penalty",),
        lambda c: c.grpo.overlong_cache is not None,
        ("grpo.overlong_cache",),
        "grpo.overlong_cache is null, so no length is punished",
    ),
    Use(
        ("grpo.penalised_reward",),
        lambda c: "penalise" in c.grpo.outcome_policy.model_dump().values(),
        tuple(f"grpo.outcome_policy.{name}" for name in OutcomePolicy.model_fields),
        "no outcome in grpo.outcome_policy is set to penalise",
    ),
    Use(
        ("openai.base_url", "openai.model_name", "openai.api_key", "openai.timeout"),
        lambda c: c.openai.server_type != "jax",
        ("openai.server_type",),
        "openai.server_type is jax: the engine is embedded and no server is asked",
    ),
    Use(
        ("openai.slots", "openai.prefill_chunk", "openai.decode_steps"),
        lambda c: c.openai.server_type == "jax",
        ("openai.server_type",),
        "openai.server_type is not jax: the server decides",
    ),
    Use(
        ("optimizer.end_fraction",),
        lambda c: c.optimizer.schedule != "constant",
        ("optimizer.schedule",),
        "optimizer.schedule is constant",
    ),
    Use(("warm_start.*",), lambda c: c.warm_start.steps > 0, ("warm_start.steps",), "warm_start.steps is 0"),
    Use(
        ("warm_start.end_fraction",),
        lambda c: c.warm_start.schedule != "constant",
        ("warm_start.schedule",),
        "warm_start.schedule is constant",
    ),
    Use(
        ("checkpoint.best_metric",),
        lambda c: c.checkpoint.keep_best > 0,
        ("checkpoint.keep_best",),
        "checkpoint.keep_best is 0",
    ),
    Use(
        ("logging.wandb_project", "logging.wandb_name"),
        lambda c: c.logging.wandb,
        ("logging.wandb",),
        "logging.wandb is false",
    ),
)


def unused(config: Config) -> dict[str, Use]:
    """Options that have no effect in this configuration: dotted path -> the rule that says so."""
    found: dict[str, Use] = {}
    for use in USES:
        if not use.when(config):
            for path in _expand(use):
                found.setdefault(path, use)
    return found


def set_by_user(block: Block, prefix: str = "") -> Iterator[str]:
    """Dotted paths of the options that were given explicitly with a value other than null."""
    for name in sorted(block.model_fields_set):
        value = getattr(block, name)
        if isinstance(value, Block):
            yield from set_by_user(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name


def _expand(use: Use) -> Iterator[str]:
    for path in use.options:
        block, _, name = path.rpartition(".")
        inner = block_type(Config.model_fields[block]) if name == "*" else None
        if inner is None:
            yield path
        else:
            yield from (f"{block}.{field}" for field in inner.model_fields if f"{block}.{field}" not in use.switches)
