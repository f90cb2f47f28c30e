"""Reward cases to the project's functions: names, types and the cases' notation of values only."""

from __future__ import annotations

import atexit
import builtins
import functools
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from hermes_jax.rollout.rewards import (
    RewardFunction,
    Rewards,
    combine_rewards,
    evaluate_reward_functions,
    function_name,
    named,
)
from hermes_jax.telemetry.alarms import StepRewards, accuracies, constant_groups_alarm, missing_rewards_alarm
from hermes_jax.tools.worker import WorkerServer
from tests.adapters_async import finished

RULES: dict[str, dict[str, Any]] = {
    "mean": {"method": "group_mean"},
    "mean_std_ddof1": {"method": "group_mean_std", "ddof": 1},
    "mean_std_ddof0": {"method": "group_mean_std", "ddof": 0},
    "leave_one_out": {"method": "leave_one_out"},
}


def value_of(notation: Any) -> Any:
    """The Python value of a case's notation; `raise`, `sleep` and `busy_loop` happen here."""
    if isinstance(notation, list):
        return [value_of(one) for one in notation]
    if not isinstance(notation, dict):
        return notation
    if set(notation) == {"list"}:
        return value_of(notation["list"])
    kind = notation.get("$")
    return VALUES[kind](notation) if kind in VALUES else {key: value_of(one) for key, one in notation.items()}


def _raise(notation: dict) -> None:
    raise getattr(builtins, notation["type"])(notation["message"])


def _sleep(notation: dict) -> None:
    time.sleep(notation["seconds"])


def _busy_loop(notation: dict) -> None:
    while True:
        pass


async def _later(notation: dict) -> Any:
    return value_of(notation["v"])


VALUES: dict[Any, Callable[[dict], Any]] = {
    "nan": lambda notation: float("nan"),
    "inf": lambda notation: float("inf"),
    "-inf": lambda notation: float("-inf"),
    "numpy": lambda notation: np.array(value_of(notation["v"]), notation["dtype"]).reshape(notation["shape"])[()],
    "decimal": lambda notation: Decimal(notation["v"]),
    "fraction": lambda notation: Fraction(notation["v"]),
    "complex": lambda notation: complex(*notation["v"]),
    "generator": lambda notation: (value_of(one) for one in notation["v"]),
    "raise": _raise,
    "sleep": _sleep,
    "busy_loop": _busy_loop,
    "async": _later,
}


def per_sample(returns: Any) -> Any:
    """Reward function: each sample says what to return."""
    return value_of(returns)


def batch(returns: list[Any]) -> Any:
    """Reward function for a whole batch: the samples all hold the same return value."""
    return value_of(returns[0])


def _part(function: str, /, **sample: Any) -> Any:
    """Reward function that is a part of a sum: the sample says what each of the parts returns."""
    return value_of(sample[function])


class Verifier:
    """A reward function as object and as method."""

    def __call__(self, returns: Any) -> Any:
        return per_sample(returns)

    def verify(self, returns: Any) -> Any:
        return per_sample(returns)


WRAPPED: dict[str, Callable[..., Any]] = {
    "partial": functools.partial(per_sample),
    "lambda": lambda returns: per_sample(returns),
    "callable_object": Verifier(),
    "bound_method": Verifier().verify,
}


@functools.cache
def server() -> WorkerServer:
    """The worker server of all cases; it would end with this process anyway."""
    server = WorkerServer()
    atexit.register(server.close)
    return server


def evaluate(functions: list[RewardFunction], samples: list[dict[str, Any]]) -> Rewards:
    """Runs reward functions as training does."""
    return finished(evaluate_reward_functions(functions, samples, server()))


def reward_function(case: dict) -> dict:
    """`rewards`, `counters`, `counters_also`, and with `wrap` the metric `names` of the ways to wrap the function.

    Each way of wrapping is a run of its own; all must give the same.
    """
    expected = case["expected"]
    count = len(expected["rewards"])
    timeout_s = float(expected.get("timeout_s", 60))
    if case["style"] == "batch":
        functions, returns = [RewardFunction(batch, style="batch", timeout_s=timeout_s)], [case["returns"]] * count
    else:
        wrapped = [WRAPPED[way] for way in expected.get("wrap", ())] or [per_sample]
        functions, returns = [RewardFunction(one, timeout_s=timeout_s) for one in wrapped], case["returns"]
    samples = [{"returns": one} for one in returns]
    first, *others = (_one_run(function, samples) for function in functions)
    assert all(other == first for other in others)
    return first | {"names": list(named(functions)), "wrap": expected.get("wrap")}


def _one_run(function: RewardFunction, samples: list[dict[str, Any]]) -> dict[str, Any]:
    result = evaluate([function], samples)
    return {
        "rewards": [part.value for parts in result.parts for part in parts.values()],
        "counters": {name: result.counters[name] for name in ("reward_missing", "verifier_errors")},
        "counters_also": {"verifier_timeouts": result.counters["verifier_timeouts"]},
    }


def combine(case: dict) -> dict:
    """`rewards`: the weighted sums."""
    names = list(case["functions"])
    functions = [
        RewardFunction(functools.partial(_part, name), weight=case["weights"][name], name=name) for name in names
    ]
    rows = zip(*(case["functions"][name] for name in names), strict=True)
    result = evaluate(functions, [dict(zip(names, row, strict=True)) for row in rows])
    assert [combine_rewards(parts, case["weights"]) for parts in result.parts] == list(result.totals)
    return {"rewards": [total.value for total in result.totals]}


def group(case: dict) -> dict:
    """`advantages` by rule (`any` = all of them), `excluded` members, `counters`."""
    from hermes_jax.objectives import group_advantages  # not above: the verifier processes import this module

    rewards: Any = value_of(case["rewards"])
    if "dtype" in case:
        rewards = np.array(rewards, case["dtype"])
    results = {rule: group_advantages(rewards, case["group_ids"], **options) for rule, options in RULES.items()}
    result = results["mean"]
    by_rule = {rule: one.advantages.tolist() for rule, one in results.items()}
    if "any" in case["expected"]["advantages"]:
        by_rule = {"any": [max((row[at] for row in by_rule.values()), key=abs) for at in range(len(result.valid))]}
    return {
        "advantages": by_rule,
        "excluded": np.flatnonzero(~result.valid).tolist(),
        "counters": {
            "groups": len(result.group_ids),
            "groups_constant": int(result.constant.sum()),
            "groups_too_few_valid": int(result.too_few.sum()),
            "reward_missing": int((~result.valid).sum()),
        },
    }


def metrics(case: dict) -> dict:
    """Accuracies, or the `warning` that is due after so many steps of a kind (None before)."""
    episodes = case["episodes"]
    if "correct" in episodes:
        return accuracies(episodes["correct"], episodes["wrong"], episodes["failed"])
    if "steps_with_only_constant_groups" in episodes:
        step = StepRewards(groups=8, groups_constant=8, rewards=32, reward_missing=0)
        return {"warning": constant_groups_alarm([step] * episodes["steps_with_only_constant_groups"])}
    name = function_name(per_sample)
    step = StepRewards(groups=8, groups_constant=2, rewards=32, reward_missing=16, failures={name: 16})
    return {"warning": missing_rewards_alarm([step] * episodes["steps_with_half_the_rewards_missing"])}
