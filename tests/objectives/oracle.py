"""The objectives again, by plain loops over sequences and tokens in float64: shares no line with the package."""

from __future__ import annotations

import itertools
import math

import numpy as np


def policy_loss(sequences: list[dict], spec, num_sequences: int | None = None) -> float:
    """Loss of a list of sequences: dicts of 1-D arrays `mask, logprobs, old, ref, rollout, advantages`."""
    kept = [s for s in sequences if s["mask"].any()]
    if not kept:
        return 0.0
    surrogate = [_surrogate(s, spec) for s in kept]
    loss = _reduce(surrogate, spec, num_sequences or len(sequences))
    if spec.kl is not None:
        loss += spec.beta * _reduce([_kl(s, spec) for s in kept], spec, num_sequences or len(sequences))
    return loss


def group_advantages(rewards, group_ids, method, eps=1e-6, ddof=1, whiten_eps=1e-8, token_counts=None):
    """Group by group, member by member."""
    members: dict = {}
    for i, (reward, group) in enumerate(zip(rewards, group_ids, strict=True)):
        members.setdefault(group, [])
        if math.isfinite(reward):
            members[group].append(i)
    valid = [i for ids in members.values() for i in ids]
    centred = dict.fromkeys(range(len(rewards)), 0.0)
    out = np.zeros(len(rewards))
    for ids in members.values():
        values = [rewards[i] for i in ids]
        if len(ids) < 2 or max(values) - min(values) <= 1e-6 * max(1.0, abs(max(values))):
            continue
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))
        for i in ids:
            centred[i] = rewards[i] - mean
            if method == "group_mean":
                out[i] = centred[i]
            elif method == "group_mean_std":
                out[i] = centred[i] / (std + eps)
            elif method == "leave_one_out":
                out[i] = rewards[i] - (math.fsum(values) - rewards[i]) / (len(values) - 1)
            elif method == "group_mean_batch_std":
                _, batch_std = _moments([rewards[j] for j in valid], None, ddof)
                out[i] = centred[i] / (batch_std + eps)
    if method in ("batch_norm", "group_mean_batch_norm"):
        source = list(rewards) if method == "batch_norm" else [centred[i] for i in range(len(rewards))]
        weights = None if token_counts is None else [token_counts[i] for i in valid]
        mean, std = _moments([source[i] for i in valid], weights, ddof)
        for i in valid:
            out[i] = (source[i] - mean) / math.sqrt(std**2 + whiten_eps)
    return out


def gdpo_advantages(parts, group_ids):
    """Part by part, group by group."""
    total = np.sum([group_advantages(values, group_ids, "group_mean_std") for values in parts.values()], axis=0)
    valid = [i for i in range(len(group_ids)) if any(math.isfinite(values[i]) for values in parts.values())]
    mean, std = _moments([total[i] for i in valid], None, 1)
    if not valid or np.ptp(total[valid]) <= 1e-6:  # what is left where parts cancel is rounding
        return np.zeros(len(total))
    return np.array([(total[i] - mean) / math.sqrt(std**2 + 1e-8) if i in valid else 0.0 for i in range(len(total))])


def pass_at_k_advantages(rewards, group_ids, k):
    """By writing down every choice of k members."""
    out = np.zeros(len(rewards))
    for group in set(group_ids):
        ids = [i for i, g in enumerate(group_ids) if g == group and math.isfinite(rewards[i])]
        choices = list(itertools.combinations(ids, k))
        best = [max(rewards[i] for i in choice) for choice in choices]
        if len(ids) <= k or np.ptp([rewards[i] for i in ids]) <= 1e-6:
            continue
        for i in ids:
            with_i = [b for b, choice in zip(best, choices, strict=True) if i in choice]
            out[i] = (np.mean(with_i) - np.mean(best)) / (np.std(best) + 1e-6)
    return out


def _moments(values, weights, ddof):
    repeated = values if weights is None else [v for v, w in zip(values, weights, strict=True) for _ in range(int(w))]
    if not repeated:
        return 0.0, 0.0
    return float(np.mean(repeated)), float(np.std(repeated, ddof=ddof)) if len(repeated) > ddof else 0.0


def _surrogate(s: dict, spec) -> list[float]:
    at = np.flatnonzero(s["mask"])
    lp, old, adv = (s[name][at].astype(float) for name in ("logprobs", "old", "advantages"))
    bound = spec.log_ratio_clamp or math.inf
    low = -math.inf if spec.clip_low is None else 1 - spec.clip_low
    high = math.inf if spec.clip_high is None else 1 + spec.clip_high
    mean = float(np.mean(lp - old))
    losses = []
    for t in range(len(at)):
        exponent = mean if spec.objective in ("gspo", "gspo_token") else lp[t] - old[t]
        r = math.exp(max(-bound, min(bound, exponent)))
        if spec.objective == "reinforce":
            loss = -adv[t] * lp[t]
        elif spec.objective == "cispo":
            loss = -max(low, min(high, r)) * adv[t] * lp[t]
        elif spec.objective == "gmpo":
            clipped = [math.exp(max(-bound, min(bound, lp[j] - old[j]))) for j in range(len(at))]
            clipped = [
                min(x, high) if a > 0 else max(x, low) if a < 0 else x for x, a in zip(clipped, adv, strict=True)
            ]
            loss = -(math.prod(clipped) ** (1 / len(clipped))) * adv[t]
        elif spec.objective == "dppo":
            moved = math.exp(lp[t]) - math.exp(old[t])
            loss = 0.0 if abs(moved) > spec.tv_max and moved * adv[t] > 0 else -r * adv[t]
        elif spec.objective == "sapo":
            tau = spec.tau_pos if adv[t] > 0 else spec.tau_neg
            loss = -4 / tau / (1 + math.exp(-tau * (r - 1))) * adv[t]
        else:
            loss = -min(r * adv[t], max(low, min(high, r)) * adv[t])
            if spec.objective == "clip" and spec.dual_clip and adv[t] < 0:
                loss = min(loss, -spec.dual_clip * adv[t])
        losses.append(loss * _weight(s, at, t, spec.correction))
    return losses


def _weight(s: dict, at, t: int, correction) -> float:
    if correction is None:
        return 1.0
    d = [0.0 if math.isnan(s["rollout"][j]) else float(s["old"][j] - s["rollout"][j]) for j in at]
    exponent = {"product": sum(d), "geometric": sum(d) / len(d)}.get(correction.mode.split("_")[-1], d[t])
    rho = math.exp(exponent)
    if "truncate" in correction.mode:
        return min(rho, correction.max)
    return rho if correction.low <= rho <= correction.high else 0.0


def _kl(s: dict, spec) -> list[float]:
    d = [float(s["logprobs"][j] - s["ref"][j]) for j in np.flatnonzero(s["mask"])]
    return [{"k1": x, "k2": x * x / 2, "k3": math.expm1(-x) + x, "abs": abs(x)}[spec.kl] for x in d]


def _reduce(losses: list[list[float]], spec, num_sequences: int) -> float:
    everything = math.fsum(x for row in losses for x in row)
    if spec.aggregation == "token_mean":
        return everything / sum(len(row) for row in losses)
    if spec.aggregation == "sequence_mean":
        return math.fsum(sum(row) / len(row) for row in losses) / len(losses)
    if spec.aggregation == "sequence_sum":
        return everything / len(losses)
    return everything / (num_sequences * spec.max_tokens)
