"""Pure functions over arrays: advantages (host), policy losses, KL, importance correction, aggregation."""

from hermes_jax.objectives.advantages import (
    ADVANTAGE_METHODS,
    AdvantageResult,
    gdpo_advantages,
    group_advantages,
    pass_at_k_advantages,
)
from hermes_jax.objectives.aggregation import AGGREGATIONS, Denominators, aggregate, count_denominators
from hermes_jax.objectives.check import LossReport, check_loss, try_loss
from hermes_jax.objectives.correction import (
    CORRECTION_MODES,
    Correction,
    RolloutWeights,
    effective_sample_size,
    mismatch_metrics,
    rollout_weights,
    weight_metrics,
)
from hermes_jax.objectives.gae import gae, place_outcome_reward, whiten
from hermes_jax.objectives.kl import (
    KL_KINDS,
    kl_estimate,
    kl_in_sequence_rewards,
    kl_in_token_rewards,
    kl_on_host,
    kl_penalty,
)
from hermes_jax.objectives.metrics import Mean, Metrics, finish_metrics, merge_metrics
from hermes_jax.objectives.objective import PolicyBatch, TokenLosses, policy_objective, token_losses
from hermes_jax.objectives.overlong import drop_truncated, soft_overlong_penalty
from hermes_jax.objectives.policy import (
    OBJECTIVES,
    Surrogate,
    cispo_loss,
    clip_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    guard,
    reinforce_loss,
    sapo_loss,
)
from hermes_jax.objectives.segments import clean, safe_divide, segment_means, segment_totals
from hermes_jax.objectives.spec import ObjectiveSpec
from hermes_jax.objectives.user_loss import LossError
from hermes_jax.objectives.value import value_loss

__all__ = [
    "ADVANTAGE_METHODS",
    "AGGREGATIONS",
    "CORRECTION_MODES",
    "KL_KINDS",
    "OBJECTIVES",
    "AdvantageResult",
    "Correction",
    "Denominators",
    "LossError",
    "LossReport",
    "Mean",
    "Metrics",
    "ObjectiveSpec",
    "PolicyBatch",
    "RolloutWeights",
    "Surrogate",
    "TokenLosses",
    "aggregate",
    "check_loss",
    "cispo_loss",
    "clean",
    "clip_loss",
    "count_denominators",
    "dppo_loss",
    "drop_truncated",
    "effective_sample_size",
    "finish_metrics",
    "gae",
    "gdpo_advantages",
    "gmpo_loss",
    "group_advantages",
    "gspo_loss",
    "gspo_token_loss",
    "guard",
    "kl_estimate",
    "kl_in_sequence_rewards",
    "kl_in_token_rewards",
    "kl_on_host",
    "kl_penalty",
    "merge_metrics",
    "mismatch_metrics",
    "pass_at_k_advantages",
    "place_outcome_reward",
    "policy_objective",
    "reinforce_loss",
    "rollout_weights",
    "safe_divide",
    "sapo_loss",
    "segment_means",
    "segment_totals",
    "soft_overlong_penalty",
    "token_losses",
    "try_loss",
    "value_loss",
    "weight_metrics",
    "whiten",
]
