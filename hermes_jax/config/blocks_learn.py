"""Options of learning: the objective, the optimizer, the warm start and the learner's shapes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hermes_jax.config.fields import Block, Counts, option
from hermes_jax.config.presets import PresetName

OutcomeRule = Literal["keep", "mask", "penalise", "drop"]
Schedule = Literal["constant", "cosine", "linear"]


class OutcomePolicy(Block):
    """What each outcome of an episode does to training.

    keep = trains as it is. mask = counts in its group's statistics, carries no loss. penalise = its reward is replaced
    by grpo.penalised_reward. drop = neither in the statistics nor in the loss. DAPO's overlong filtering is mask for
    length and context_full.
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
    """The objective: signal, ratio, clip, correction, KL and aggregation. A preset names a whole one."""

    preset: PresetName | None = option(
        None, "Objective by name: stands for the values listed at the end of this help; keys beside it win."
    )
    temperature: float = option(0.7, "Sampling temperature of training episodes; divides all log-probs.", gt=0)
    iterations_per_batch: int = option(4, "Passes over the episodes of one step.", "passes", ge=1)
    mini_batches: int = option(1, "Optimizer updates per pass; groups are never split.", "updates", ge=1)
    objective: Literal["clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dppo", "reinforce"] = option(
        "clip",
        "Per-token loss: clip = PPO's clipped surrogate, gspo = the same with the sequence's ratio (gspo_token: its "
        "gradient through the own token only), cispo = clipped ratio as a weight, sapo = soft gate, gmpo = "
        "geometric mean of the sequence's clipped ratios, dppo = tokens whose probability moved far are masked, "
        "reinforce = -advantage * log-prob.",
    )
    policy_loss: str | None = option(
        None, "A per-token loss of your own, 'module:function', in place of objective; see docs/losses.md."
    )
    clip_low: float | None = option(
        0.2, "The ratio is clipped below at 1 - clip_low (Hermes: epsilon_clip); null = no bound.", ge=0, lt=1
    )
    clip_high: float | None = option(
        0.2, "The ratio is clipped above at 1 + clip_high (Hermes: epsilon_clip_upper); null = no bound.", ge=0
    )
    dual_clip: float | None = option(
        None,
        "For negative advantages the ratio counts at most this much (also known as two-sided clipping with delta); "
        "null = off.",
        gt=1,
    )
    log_ratio_clamp: float | None = option(
        20.0, "Log ratios are clamped to +- this before exp; null = never.", "nats", gt=0
    )
    tau_pos: float = option(1.0, "Temperature of sapo's gate for tokens with positive advantage.", gt=0)
    tau_neg: float = option(1.05, "Temperature of sapo's gate for tokens with negative advantage.", gt=0)
    tv_max: float = option(
        0.15, "dppo leaves out tokens whose probability moved by more than this along their advantage.", gt=0, le=1
    )
    use_liger_loss: bool = option(
        True, "Log-probs from hidden states in chunks, so that no [tokens, vocabulary] array exists; false = one chunk."
    )
    head_chunk: int = option(1024, "Tokens per chunk of the head.", "tokens", ge=1)
    beta: float = option(0.0, "Weight of the KL term to the policy at the start; 0 = no such term.", ge=0)
    kl_in: Literal["loss", "reward"] = option(
        "loss", "Where the KL stands: a term of the loss, or taken off each episode's reward before its advantage."
    )
    kl_kind: Literal["k1", "k2", "k3", "abs"] = option(
        "k3",
        "Estimator of the KL. Gradient in the loss: k2 = reverse KL, k3 = forward KL, abs = total variation, k1 = none "
        "on average. In the reward: k1 = reverse KL, the others none of a KL.",
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus; 0 = none.", ge=0)
    correction: Literal[
        "none",
        "token_truncate",
        "token_mask",
        "sequence_truncate_product",
        "sequence_truncate_geometric",
        "sequence_mask_product",
        "sequence_mask_geometric",
    ] = option(
        "none",
        "Weights for the difference between engine and learner: exp(learner - engine) of the token, or of the sequence "
        "(sum or mean of its tokens), truncated at correction_high or 0 outside correction_low to correction_high.",
    )
    correction_low: float | None = option(0.5, "Weights below this become 0; null = no bound.", ge=0)
    correction_high: float | None = option(
        2.0, "Weights above this are truncated to it, or become 0; null = no bound.", gt=0
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = option(
        "token_mean",
        "How per-token losses become one number; constant divides by sequences * model.context_length.",
    )
    advantage: Literal[
        "group_mean_std",
        "group_mean",
        "leave_one_out",
        "group_mean_batch_std",
        "batch_norm",
        "group_mean_batch_norm",
        "gdpo",
        "pass_at_k",
    ] = option(
        "group_mean_std",
        "How rewards become advantages: R minus the group's mean, divided by the standard deviation of the group or of "
        "the step (batch_std); R minus the mean of the other members; R normalised over the step, without or with the "
        "group's mean taken off first (batch_norm); each part of the reward normalised by itself (gdpo); by how much "
        "the episode raises the best of pass_k (pass_at_k).",
    )
    pass_k: int = option(4, "Episodes of which the best counts, for advantage: pass_at_k.", "episodes", ge=1)
    overlong_cache: int | None = option(
        None,
        "DAPO's soft punishment: over the last so many tokens before env.max_episode_tokens the reward falls linearly "
        "by overlong_penalty; null = off.",
        "tokens",
        ge=0,
    )
    overlong_penalty: float = option(1.0, "What an episode of full length loses of its reward.", gt=0)
    dynamic_sampling: int = option(
        0,
        "DAPO's dynamic sampling: groups without variance are replaced by groups of other tasks, up to so many times "
        "env.groups_per_step more in a step; 0 = never.",
        "collections",
        ge=0,
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
