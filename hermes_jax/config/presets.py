"""Objectives by name: `grpo.preset: dapo` stands for these values of the grpo block; keys given beside it win.

| preset | numbers from |
|---|---|
| `grpo` | DeepSeekMath, arXiv:2402.03300: KL weight 0.04, k3 in the loss, mean over each answer; clip 0.2 as in PPO |
| `dapo` | arXiv:2503.14476: clip 0.2/0.28, mean over all tokens, no KL, dynamic sampling (it names no budget: 2); its |
| | soft punishment needs a length: `overlong_cache` of a fifth of `env.max_episode_tokens` |
| `dr_grpo` | arXiv:2503.20783: no division by standard deviation or length, clip 0.2, no KL |
| `gspo` | arXiv:2507.18071: the sequence's ratio, clip 3e-4/4e-4, no KL |
| `cispo` | MiniMax-M1, arXiv:2506.13585: no lower bound, no KL, mean over all tokens (*) |
| `sapo` | arXiv:2511.20347: temperatures 1 and 1.05, mean over each answer |
| `rloo` | arXiv:2402.14740: plain policy gradient of whole answers, so one update per collection; k1 in the reward, |
| | 0.03 (**) |
| `reinforce++` | arXiv:2501.03262: rewards normalised over the batch, clip 0.2, mean over all tokens; k1 in the |
| | reward, 0.01 (**), for the whole episode rather than from each token on |

(*) It tunes the upper bound and names no value. Weights up to 5 are in the range that ScaleRL (arXiv:2510.13786) uses.
(**) A usual size; not looked up in the paper.

A preset is the objective alone: group size, learning rate, lengths and the like stay yours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

PresetName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "rloo", "reinforce++"]

_PLAIN: dict[str, Any] = {
    "objective": "clip",
    "policy_loss": None,
    "dual_clip": None,
    "beta": 0.0,
    "entropy_coef": 0.0,
    "correction": "none",
    "overlong_cache": None,
    "dynamic_sampling": 0,
    "aggregation": "token_mean",
    "advantage": "group_mean_std",
}
"""What every preset sets, so that it is the whole objective whatever an earlier file says."""
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _PLAIN | _CLIP | {"beta": 0.04, "kl_in": "loss", "kl_kind": "k3", "aggregation": "sequence_mean"},
    "dapo": _PLAIN | {"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": 2},
    "dr_grpo": _PLAIN | _CLIP | {"advantage": "group_mean", "aggregation": "constant"},
    "gspo": _PLAIN | {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    "cispo": _PLAIN | {"objective": "cispo", "clip_low": None, "clip_high": 4.0},
    "sapo": _PLAIN | {"objective": "sapo", "tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "sequence_mean"},
    "rloo": _PLAIN
    | {"objective": "reinforce", "advantage": "leave_one_out", "aggregation": "sequence_sum"}
    | {"iterations_per_batch": 1, "mini_batches": 1}
    | {"beta": 0.03, "kl_in": "reward", "kl_kind": "k1"},
    "reinforce++": _PLAIN | _CLIP | {"advantage": "batch_norm"} | {"beta": 0.01, "kl_in": "reward", "kl_kind": "k1"},
}
"""Preset -> values of the grpo block."""
