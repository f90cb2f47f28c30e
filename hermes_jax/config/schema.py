"""The whole configuration: its blocks, and what must hold between options."""

from __future__ import annotations

from pydantic import Field, model_validator

from hermes_jax.config.blocks_learn import GRPOConfig, LearnerConfig, OptimizerConfig, WarmStartConfig
from hermes_jax.config.blocks_run import (
    CheckpointConfig,
    EnvConfig,
    LoggingConfig,
    MeshConfig,
    ModelConfig,
    OpenAIConfig,
)
from hermes_jax.config.fields import Block, option


class Config(Block):
    """Every option of a run."""

    seed: int = option(0, "Every random number of the run derives from it.", ge=0)
    run_dir: str = option("runs/default", "Folder for checkpoints, metrics, episodes and the resolved config.")
    compilation_cache: str | None = option(
        None,
        "Folder that keeps compiled programs for the next start; null = JAX_COMPILATION_CACHE_DIR or else in your "
        "cache folder, off = none.",
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    openai: OpenAIConfig = Field(default_factory=OpenAIConfig)
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths a packed row may have (tokens), ascending; the last one holds the longest trajectory."""
        widths = self.learner.row_widths
        return (self.model.context_length,) if widths is None else widths

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the whole run without the warm start; what schedules count."""
        return self.env.total_steps * self.grpo.iterations_per_batch * self.grpo.mini_batches

    @property
    def max_concurrent_episodes(self) -> int:
        """Episodes that run at once."""
        return self.env.max_concurrent_episodes or self.env.group_size * self.env.groups_per_step

    @model_validator(mode="after")
    def _check(self) -> Config:
        problems = [message for broken, message in _conflicts(self) if broken]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _conflicts(config: Config) -> list[tuple[bool, str]]:
    """Pairs of (broken?, what is wrong and what to do) for rules between options."""
    model, env, grpo, learner, mesh = config.model, config.env, config.grpo, config.learner, config.mesh
    optimizer, warm = config.optimizer, config.warm_start
    shards = max(mesh.data, 1) * mesh.fsdp
    widths = config.row_widths
    widest = max(widths, default=0)
    return [
        (
            model.path is not None and model.builder is not None,
            "model.path and model.builder are both set: choose one, set the other to null",
        ),
        (
            model.context_length <= env.max_token_length,
            f"model.context_length ({model.context_length}) must exceed env.max_token_length ({env.max_token_length}): "
            "a reply has to fit in the context together with its prompt; lower env.max_token_length",
        ),
        (
            env.group_size < 2 and grpo.advantage != "batch_norm",
            f"env.group_size is {env.group_size}, but grpo.advantage: {grpo.advantage} compares episodes of one task; "
            "set env.group_size to 2 or more, or grpo.advantage to batch_norm",
        ),
        (
            grpo.mini_batches > env.groups_per_step,
            f"grpo.mini_batches ({grpo.mini_batches}) exceeds env.groups_per_step ({env.groups_per_step}): "
            "a group is never split; lower grpo.mini_batches",
        ),
        *_objective_conflicts(config),
        (
            not widths or list(widths) != sorted(set(widths)) or widths[0] < 1,
            f"learner.row_widths must be ascending and positive, got {list(widths)}",
        ),
        (
            widest < model.context_length,
            f"the widest of learner.row_widths ({widest}) is below model.context_length ({model.context_length}): "
            "the longest trajectory would fit in no row; add a width",
        ),
        (
            learner.micro_tokens < widest * shards,
            f"learner.micro_tokens ({learner.micro_tokens}) must hold one row of the widest learner.row_widths on each "
            f"device that shares a batch: at least {widest} * {shards}",
        ),
        (
            learner.max_tokens is not None and learner.max_tokens < model.context_length,
            f"learner.max_tokens ({learner.max_tokens}) is below model.context_length ({model.context_length})",
        ),
        (
            optimizer.schedule != "constant" and 0 < config.total_updates <= optimizer.warmup_steps,
            f"optimizer.warmup_steps ({optimizer.warmup_steps}) leaves nothing of the run's {config.total_updates} "
            f"updates for optimizer.schedule: {optimizer.schedule}; lower it",
        ),
        (
            warm.schedule != "constant" and 0 < warm.steps <= warm.warmup_steps,
            f"warm_start.warmup_steps ({warm.warmup_steps}) leaves nothing of warm_start.steps ({warm.steps}) for "
            f"warm_start.schedule: {warm.schedule}; lower it",
        ),
        (mesh.data == 0, "mesh.data is 0: use -1 for all devices that are left, or a positive number"),
    ]


def _objective_conflicts(config: Config) -> list[tuple[bool, str]]:
    """The same for the objective."""
    env, grpo = config.env, config.grpo
    most = env.max_episode_tokens
    low, high = grpo.correction_low, grpo.correction_high
    return [
        (
            grpo.dual_clip is not None and grpo.clip_high is not None and grpo.dual_clip < 1 + grpo.clip_high,
            f"grpo.dual_clip ({grpo.dual_clip}) must be at least 1 + grpo.clip_high ({1 + (grpo.clip_high or 0)})",
        ),
        (
            "mask" in grpo.correction and low is not None and high is not None and low > high,
            f"grpo.correction_low ({low}) lies above grpo.correction_high ({high}): no token would be trained",
        ),
        (
            grpo.advantage == "pass_at_k" and grpo.pass_k >= env.group_size,
            f"grpo.pass_k ({grpo.pass_k}) must be below env.group_size ({env.group_size}): of a whole group there is "
            "one best, and no member differs from another; lower it",
        ),
        (
            grpo.advantage == "batch_norm" and grpo.dynamic_sampling > 0,
            "grpo.dynamic_sampling replaces groups whose rewards are equal, but grpo.advantage: batch_norm learns from "
            "them, too; set grpo.dynamic_sampling to 0",
        ),
        (
            grpo.advantage == "gdpo" and _changes_rewards(grpo),
            "grpo.advantage: gdpo normalises each part of the reward by itself, so nothing can be taken off the whole: "
            "set grpo.overlong_cache to null, grpo.kl_in to loss and no outcome to penalise, or choose another",
        ),
        (
            grpo.overlong_cache is not None and most is None,
            "grpo.overlong_cache punishes lengths near env.max_episode_tokens, which is null: set it, or set "
            "grpo.overlong_cache to null",
        ),
        (
            grpo.overlong_cache is not None and most is not None and grpo.overlong_cache > most,
            f"grpo.overlong_cache ({grpo.overlong_cache}) exceeds env.max_episode_tokens ({most}); lower it",
        ),
    ]


def _changes_rewards(grpo: GRPOConfig) -> bool:
    penalises = "penalise" in grpo.outcome_policy.model_dump().values()
    return grpo.overlong_cache is not None or penalises or (grpo.beta > 0 and grpo.kl_in == "reward")
