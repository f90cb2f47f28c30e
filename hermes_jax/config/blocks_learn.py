"""Options of learning: the objective, the optimizer, the warm start and the learner's shapes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hermes_jax.config.fields import Block, Counts, option

OutcomeRule = Literal["keep", "mask", "penalise", "drop"]
Schedule = Literal["constant", "cosine", "linear"]


class OutcomePolicy(Block):
    """What each outcome of an episode does to training.

    keep = trains as it is. mask = counts in its group's statistics, carries no loss. penalise = its reward is replaced
    by grpo.penalised_reward. drop = neither in the statistics nor in the loss.
    """

    completed: OutcomeRule = option("keep", "The policy gave a final answer.")
    max_turns: OutcomeRule = option("keep", "env.max_agent_turns was reached.")
    length: OutcomeRule = option("keep", "A turn reached env.max_token_length.")
    context_full: OutcomeRule = option("keep", "No room was left in model.context_length.")
    timeout: OutcomeRule = option("mask", "env.episode_timeout passed; depends on the machine's speed.")
    tool_timeout: OutcomeRule = option("keep", "The episode ended with a tool call past env.terminal_timeout.")
    env_error: OutcomeRule = option("drop", "The environment or its sandbox failed.")
    verifier_error: OutcomeRule = option("drop", "The reward function failed: the reward is missing, not 0.")
    aborted: OutcomeRule = option("drop", "The episode was ended from outside.")
    error: OutcomeRule = option("drop", "The engine or the trainer failed.")


class GRPOConfig(Block):
    """The objective: signal, ratio, clip, KL and aggregation."""

    temperature: float = option(0.7, "Sampling temperature of training episodes; divides all log-probs.", gt=0)
    iterations_per_batch: int = option(4, "Passes over the episodes of one step.", "passes", ge=1)
    mini_batches: int = option(1, "Optimizer updates per pass; groups are never split.", "updates", ge=1)
    objective: Literal["clip", "reinforce"] = option(
        "clip", "Per-token loss: clip = PPO's clipped surrogate, reinforce = -advantage * log-prob."
    )
    clip_low: float = option(0.2, "The ratio is clipped below at 1 - clip_low (Hermes: epsilon_clip).", ge=0, lt=1)
    clip_high: float = option(0.2, "The ratio is clipped above at 1 + clip_high (Hermes: epsilon_clip_upper).", ge=0)
    dual_clip: float | None = option(
        None, "For negative advantages the ratio counts at most this much; null = off.", gt=1
    )
    log_ratio_clamp: float | None = option(
        20.0, "Log ratios are clamped to +- this before exp; null = never.", "nats", gt=0
    )
    use_liger_loss: bool = option(
        True, "Log-probs from hidden states in chunks, so that no [tokens, vocabulary] array exists; false = one chunk."
    )
    head_chunk: int = option(1024, "Tokens per chunk of the head.", "tokens", ge=1)
    beta: float = option(0.0, "Weight of the KL term to the policy at the start; 0 = no such term.", ge=0)
    kl_kind: Literal["k1", "k2", "k3"] = option(
        "k3", "Estimator of the KL term. Gradients: k2 = reverse KL, k3 = forward KL, k1 = none on average."
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = option(
        "token_mean",
        "How per-token losses become one number; constant divides by sequences * model.context_length.",
    )
    advantage: Literal["group_mean_std", "group_mean", "leave_one_out"] = option(
        "group_mean_std", "How the rewards of a group become advantages."
    )
    max_skipped_steps: int = option(
        5, "So many updates in a row skipped for non-finite gradients stop the run.", "updates", ge=1
    )
    penalised_reward: float = option(0.0, "Reward of episodes whose outcome is set to penalise.")
    outcome_policy: OutcomePolicy = Field(default_factory=OutcomePolicy)


class OptimizerConfig(Block):
    """AdamW with warm-up; schedules count optimizer updates, not steps."""

    learning_rate: float = option(1e-6, "Peak learning rate.", "per update", ge=0)
    schedule: Schedule = option("constant", "After the warm-up: constant, or falling to end_fraction at the end.")
    warmup_steps: int = option(0, "Updates over which the learning rate rises from 0.", "updates", ge=0)
    end_fraction: float = option(0.1, "Last learning rate of a falling schedule as a share of the peak.", ge=0, le=1)
    weight_decay: float = option(0.0, "Decoupled weight decay; norms, biases and embeddings are left out.", ge=0)
    b1: float = option(0.9, "Decay of the first moment.", ge=0, lt=1)
    b2: float = option(0.95, "Decay of the second moment.", ge=0, lt=1)
    eps: float = option(1e-8, "Added to the root of the second moment.", gt=0)
    max_grad_norm: float | None = option(1.0, "Gradients are scaled down to this global norm; null = never.", gt=0)


class WarmStartConfig(Block):
    """Before GRPO: the same learner imitates the environment's scripted episodes."""

    steps: int = option(0, "Updates of the warm start; 0 = none.", "updates", ge=0)
    episodes_per_step: int = option(16, "Scripted episodes per update.", "episodes", ge=1)
    learning_rate: float = option(1e-4, "Peak learning rate.", "per update", ge=0)
    schedule: Schedule = option("cosine", "After the warm-up: constant, or falling to end_fraction at the end.")
    warmup_steps: int = option(30, "Updates over which the learning rate rises from 0.", "updates", ge=0)
    end_fraction: float = option(0.1, "Last learning rate of a falling schedule as a share of the peak.", ge=0, le=1)
    max_grad_norm: float | None = option(1.0, "Gradients are scaled down to this global norm; null = never.", gt=0)


class LearnerConfig(Block):
    """Shapes of the packed batch. Few shapes = few compilations."""

    row_widths: Counts | None = option(
        None, "Widths a packed row may have, ascending; null = model.context_length only.", "tokens"
    )
    micro_tokens: int = option(
        8192, "Tokens of one forward and backward pass, padding included; what memory allows.", "tokens", ge=1
    )
    max_tokens: int | None = option(
        None,
        "Tokens of the largest batch of one update, padding included; null = room for all episodes of a mini-batch at "
        "full context.",
        "tokens",
        ge=1,
    )
    remat: bool = option(False, "Recompute each layer in the backward pass: less memory, about a third more work.")
