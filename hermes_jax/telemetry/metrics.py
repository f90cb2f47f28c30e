"""Every metric that a run may write: name, unit, meaning. A name that is not in the table is an error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """What a number is.

    Args:
        unit: what it counts; "share" = 0 to 1, empty = a plain number.
        meaning: one line.
    """

    unit: str
    meaning: str


_TRAIN = {
    "train/reward": Metric("", "mean reward of the step's episodes, missing ones left out"),
    "train/reward_std": Metric("", "standard deviation of these rewards"),
    "train/reward_min": Metric("", "lowest of these rewards"),
    "train/reward_max": Metric("", "highest of these rewards"),
    "train/reward_missing": Metric("share", "episodes without a reward (verifier failed or had no opinion)"),
    "train/reward_part/<part>": Metric("", "mean of a named part of the reward, missing ones left out"),
    "train/success": Metric("share", "episodes that solved their task, among all episodes"),
    "train/success_completed": Metric("share", "episodes that solved their task, among those that were completed"),
    "train/episodes": Metric("episodes", "episodes of the step"),
    "train/outcome/<outcome>": Metric("share", "episodes that ended this way"),
    "train/response_tokens": Metric("tokens", "mean number of sampled tokens per episode"),
    "train/response_tokens_max": Metric("tokens", "most sampled tokens of an episode"),
    "train/truncated": Metric("share", "episodes cut by a token limit (outcomes length and context_full)"),
    "train/kl_penalty": Metric("", "mean of what the KL took off the rewards; only with grpo.kl_in: reward"),
    "train/turns": Metric("turns", "mean number of model turns per episode"),
    "train/trajectories": Metric("trajectories", "token sequences that the step's episodes gave"),
}

_COUNTERS = {
    "turns": "model turns",
    "sampled_tokens": "tokens that the policy sampled",
    "prompt_tokens": "tokens of the prompts of all turns; each turn's prompt holds the turns before it",
    "empty_turns": "turns that ended before a single token was sampled",
    "tool_calls": "calls that reached a tool, whether it succeeded or not",
    "malformed_calls": "calls that could not be read (bad JSON, wrong form); the policy was told so",
    "unknown_tools": "calls of a tool that is not offered; the policy was told so",
    "tool_errors": "calls with wrong arguments or a tool that failed; a command's exit code is no error",
    "tool_timeouts": "calls that did not end within env.terminal_timeout",
    "history_rewrites": "turns before which the chat template changed earlier ones, which begins a new trajectory",
    "resumed_replies": "replies that the engine broke off and that were sampled on from there",
    "release_failures": "episodes whose place in the engine's cache could not be given back",
    "reward_missing": "episodes without a reward (the verifier failed or had no opinion)",
    "verifier_errors": "episodes whose reward function raised, crashed, was too slow or returned no finite number",
    "verifier_timeouts": "those of them in which it was too slow",
}
"""Counters of an episode; the metric is their mean over all episodes of the step."""

_GROUPS = {
    "groups/count": Metric("groups", "tasks of the step, refills included"),
    "groups/trained": Metric("groups", "those trained on; fewer than tasks with grpo.dynamic_sampling"),
    "groups/constant": Metric("share", "zero-variance groups: all valid rewards are equal, they teach nothing"),
    "groups/too_few": Metric("share", "groups with fewer than two valid rewards"),
}

_EVAL = {
    "eval/success": Metric("share", "held-out episodes that solved their task, sampled at env.agent_temperature"),
    "eval/success_greedy": Metric("share", "held-out episodes that solved their task, greedy decoding"),
    "eval/success_completed": Metric("share", "the sampled ones that solved it, among those that were completed"),
    "eval/reward": Metric("", "mean reward of held-out episodes, sampled, missing ones left out"),
    "eval/reward_greedy": Metric("", "mean reward of held-out episodes, greedy, missing ones left out"),
    "eval/reward_missing": Metric("share", "held-out episodes without a reward, sampled and greedy"),
    "eval/episodes": Metric("episodes", "held-out episodes, sampled and greedy"),
    "eval/response_tokens": Metric("tokens", "mean number of sampled tokens per held-out episode, sampled"),
    "eval/seconds": Metric("s", "time of the evaluation"),
    "eval/reward_part/<part>": Metric("", "mean of a named part of the reward of held-out episodes, sampled"),
    "eval/outcome/<outcome>": Metric("share", "held-out episodes that ended this way, sampled and greedy together"),
}

_UPDATE = {
    "update/loss": Metric("", "the whole loss"),
    "update/policy_loss": Metric("", "the aggregated surrogate"),
    "policy_loss/<name>": Metric("", "a metric of your own policy loss, mean over trained tokens"),
    "update/kl_loss": Metric("nats", "the aggregated KL term, before beta"),
    "update/kl_mean": Metric("nats", "token mean of the KL estimate to the start that the loss uses"),
    "update/kl_ref_k1": Metric("nats", "KL of the policy to the start, estimator k1: token mean of lp - ref"),
    "update/kl_ref_k3": Metric("nats", "KL of the policy to the start, estimator k3, never negative"),
    "update/entropy_mean": Metric("nats", "entropy of the next-token distribution, mean over trained tokens"),
    "update/ratio_mean": Metric("", "policy ratio to the start of the step, mean over trained tokens"),
    "update/ratio_min": Metric("", "smallest policy ratio"),
    "update/ratio_max": Metric("", "largest policy ratio"),
    "update/ratio_deviation_max": Metric("", "largest |ratio - 1| of all passes"),
    "update/first_pass_ratio_deviation": Metric(
        "", "largest |ratio - 1| before the first update; above 1e-5 scorer and learner disagree"
    ),
    "update/approx_kl_k1": Metric("nats", "KL of the policy to the start of the step: token mean of old - lp"),
    "update/clip_frac": Metric("share", "trained tokens whose ratio is clipped on either side"),
    "update/clip_frac_low": Metric("share", "trained tokens with A < 0 and ratio below 1 - clip_low"),
    "update/clip_frac_high": Metric("share", "trained tokens with A > 0 and ratio above 1 + clip_high"),
    "update/dual_clip_frac": Metric("share", "trained tokens with A < 0 and ratio above dual_clip"),
    "update/grad_norm": Metric("", "global norm of the gradient before clipping"),
    "update/learning_rate": Metric("per update", "learning rate of the last update"),
    "update/num_tokens": Metric("tokens", "tokens in the loss"),
    "update/num_sequences": Metric("trajectories", "sequences in the loss"),
    "update/update_skipped": Metric("share", "updates of the step that were skipped (loss or gradient not finite)"),
    "update/skipped_total": Metric("updates", "updates skipped since the start"),
    "update/skipped_in_a_row": Metric("updates", "updates skipped since the last one that was applied"),
    "update/count": Metric("updates", "updates applied since the start"),
}

_CORRECTION = {
    "correction/logprob_diff_abs_mean": Metric("nats", "engine against learner: mean |difference| of log-probs"),
    "correction/logprob_diff_abs_max": Metric("nats", "engine against learner: largest |difference| of log-probs"),
    "correction/mismatch_k1": Metric("nats", "KL of the engine's policy to the learner's, estimator k1"),
    "correction/mismatch_k3": Metric("nats", "KL of the engine's policy to the learner's, estimator k3"),
    "correction/affected_frac": Metric("share", "trained tokens whose correction weight was truncated or set to 0"),
    "correction/weight_mean": Metric("", "mean correction weight"),
    "correction/weight_square_mean": Metric("", "mean square of the correction weights"),
    "correction/effective_sample_size": Metric(
        "share",
        "(sum w)^2 / (n sum w^2) of the correction weights w: the share of the trained tokens that still counts",
    ),
    "correction/weight_min": Metric("", "smallest correction weight"),
    "correction/weight_max": Metric("", "largest correction weight"),
}

_SPEED = {
    "batch/padding_share": Metric("share", "cells of the micro-batches in use that hold no token"),
    "batch/tokens": Metric("tokens", "tokens of the step's trajectories, prompts and tool results included"),
    "batch/trained_tokens": Metric("tokens", "tokens of the step that carry loss"),
    "speed/generated_tokens_per_s": Metric("tokens/s", "sampled tokens by the time of the collection"),
    "speed/trained_tokens_per_s": Metric("tokens/s", "tokens that went through an update, by the time of the updates"),
    "speed/mfu": Metric("share", "model FLOPs of the updates by their time and the peak of the devices"),
    "speed/steps_per_h": Metric("steps/h", "training steps per hour, everything included"),
    "seconds/<phase>": Metric("s", "time of a phase of the step (collect, score, pack, update, publish, ...)"),
    "device/collect_idle_s": Metric("s", "time of the collection in which no call ran on the device thread"),
    "device/collect_idle_share": Metric("share", "that time by the time of the collection: waiting for tools, mostly"),
    "device/update_idle_s": Metric("s", "the same for packing, scoring, updates and publication: host work in between"),
    "device/update_idle_share": Metric("share", "that time by the time of these four"),
    "system/compilations": Metric("compilations", "functions compiled by jax in this step; 0 after warm-up"),
    "system/compile_s": Metric("s", "time jax compiled in this step"),
    "system/host_memory": Metric("bytes", "largest resident memory of the trainer's process so far"),
    "system/device_memory_peak": Metric("bytes", "largest memory in use on a device so far"),
    "loop_lag_s": Metric("s", "longest time in this step that the event loop was late"),
    "engine/tokens_generated": Metric("tokens", "sampled tokens, also of episodes that failed later"),
    "engine/prompt_tokens": Metric("tokens", "prompts as they were asked for; what was in the cache already included"),
    "engine/prefill_tokens": Metric("tokens", "the part of the prompts that had to be computed: the rest was cached"),
    "engine/prefill_tokens_padded": Metric("tokens", "the same with padding to full chunks: what the device computed"),
    "engine/prefill_calls": Metric("calls", "device calls that computed prompts, one chunk of several slots each"),
    "engine/prefill_s": Metric("s", "time that the engine waited for these; the device may go on after it"),
    "engine/copied_slots": Metric(
        "slots", "slots filled by copying a prompt that another member of the group computed"
    ),
    "engine/decode_calls": Metric("calls", "device calls that sampled, each up to openai.decode_steps tokens per slot"),
    "engine/decode_steps": Metric("steps", "steps inside these: each samples one token for every active slot"),
    "engine/decode_s": Metric("s", "time of these calls; tokens_generated / decode_s is the speed of sampling alone"),
    "engine/busy_s": Metric("s", "time with a request in flight; seconds/collect minus this is waiting for tools"),
    "engine/compilations": Metric("compilations", "functions that the engine compiled; 0 after warm-up"),
    "policy_version": Metric("", "version of the weights that collected the step"),
}

_WARM_START = {
    "warm_start/loss": Metric("nats", "mean negative log-prob of the imitated tokens"),
    "warm_start/grad_norm": Metric("", "global norm of the gradient before clipping"),
    "warm_start/learning_rate": Metric("per update", "learning rate of the update"),
    "warm_start/num_tokens": Metric("tokens", "imitated tokens"),
    "warm_start/entropy_mean": Metric("nats", "entropy of the next-token distribution on them"),
    "warm_start/update_skipped": Metric("share", "1 if the update was skipped"),
    "warm_start/trained_tokens_per_s": Metric("tokens/s", "imitated tokens by that time"),
    "warm_start/seconds": Metric("s", "time per update, data included: the mean over 25 updates"),
    "warm_start/padding_share": Metric("share", "cells of the packed batch that hold no token"),
}

_COUNTED = {
    **{f"train/counter/{name}": Metric("per episode", meaning) for name, meaning in _COUNTERS.items()},
    "train/counter/<counter>": Metric("per episode", "mean of another counter that the episodes hold"),
}

METRICS: Mapping[str, Metric] = _TRAIN | _COUNTED | _GROUPS | _EVAL | _UPDATE | _CORRECTION | _SPEED | _WARM_START
"""Name -> unit and meaning. `<part>` and the like stand for one name of letters, digits, `_`, `-` and `.`."""

_PATTERNS = [
    (re.compile(re.sub(r"<\w+>", r"[\\w.-]+", name)), metric) for name, metric in METRICS.items() if "<" in name
]


class UnknownMetricError(KeyError):
    """A metric that the table does not hold."""

    def __str__(self) -> str:
        return str(self.args[0])


def describe(name: str) -> Metric:
    """Unit and meaning of a metric.

    Raises:
        UnknownMetricError: the table does not hold it; the message names the nearest one.
    """
    if name in METRICS and "<" not in name:
        return METRICS[name]
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UnknownMetricError(f"metric {name!r} is not documented{hint} Add it to METRICS in telemetry/metrics.py")


def of_update(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Names of an update's own metrics as the table has them: `loss` -> `update/loss`; `correction/...` stays."""
    return {name if "/" in name else f"update/{name}": value for name, value in metrics.items()}


def markdown() -> str:
    """The table for the documentation."""
    rows = [f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in METRICS.items()]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows]) + "\n"
