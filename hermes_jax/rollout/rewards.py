"""Reward functions: they run in the worker server, side by side, each call with a deadline; failures are counted."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hermes_jax.rollout.reward_values import RewardValue, combine_rewards, normalise_batch, normalise_reward
from hermes_jax.tools.verifier_main import finished
from hermes_jax.tools.worker import CallFailed, CallTimedOut, WorkerServer, prepare

__all__ = [
    "RewardFunction",
    "RewardValue",
    "Rewards",
    "combine_rewards",
    "evaluate_reward_functions",
    "function_name",
    "named",
    "normalise_batch",
    "normalise_reward",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardFunction:
    """A function of a sample's fields, which it asks for by argument name.

    Args:
        function: plain or coroutine function, or any callable; it runs in another process.
        weight: its factor in the reward; 0 = a metric only.
        name: of its metric; "" = from the function.
        style: "per_sample": called with one sample's values, returns one reward. "batch": called once, with a list of
            values for each argument, returns one reward per sample.
        timeout_s: deadline of each call, in seconds.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str = ""
    style: Literal["per_sample", "batch"] = "per_sample"
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Rewards:
    """Rewards of some samples, in their order.

    Args:
        totals: the weighted sums.
        parts: by name of the function, each sample's value.
        counters: `reward_missing` (samples), `verifier_errors` and `verifier_timeouts` (values that failed).
        failures: `verifier_errors` by name of the function.
    """

    totals: tuple[RewardValue, ...]
    parts: tuple[Mapping[str, RewardValue], ...]
    counters: Mapping[str, int]
    failures: Mapping[str, int]


def function_name(function: Callable[..., Any]) -> str:
    """A name that can stand in a metric, also for partials, lambdas, bound methods and callable objects."""
    if isinstance(function, functools.partial):
        return function_name(function.func)
    name = getattr(function, "__name__", type(function).__name__)
    if name == "<lambda>":
        name = f"lambda_line_{function.__code__.co_firstlineno}"
    elif inspect.ismethod(function):
        owner = function.__self__
        name = f"{owner.__name__ if isinstance(owner, type) else type(owner).__name__}_{name}"
    return re.sub(r"\W+", "_", name).strip("_") or "reward"


def named(functions: Sequence[RewardFunction]) -> dict[str, RewardFunction]:
    """The functions by unique metric names, in their order.

    Raises:
        ValueError: all weights are 0, one is not finite, or two functions were given the same name.
    """
    result: dict[str, RewardFunction] = {}
    for function in functions:
        if not math.isfinite(function.weight):
            raise ValueError(f"the weight of a reward function must be finite, got {function.weight}")
        if function.name in result:
            raise ValueError(f"two reward functions are named {function.name!r}; give one another name")
        base = function.name or function_name(function.function)
        candidates = (base if number == 1 else f"{base}_{number}" for number in range(1, len(functions) + 2))
        result[next(name for name in candidates if name not in result)] = function
    if functions and all(function.weight == 0 for function in functions):
        raise ValueError("every reward function has weight 0: there is no reward; set a weight")
    return result


async def evaluate_reward_functions(
    functions: Sequence[RewardFunction],
    samples: Sequence[Mapping[str, Any]],
    server: WorkerServer,
    labels: Sequence[str] | None = None,
) -> Rewards:
    """Calls every function for every sample, side by side, in the worker server.

    Args:
        samples: named values; each function gets those that its signature names (all, if it takes `**kwargs`).
        labels: what the log calls the samples; by default their places.

    Raises:
        ValueError: a function asks for a value that the samples do not have.
        TypeError: a function or value cannot be sent to another process.
        WorkerServerDied: the server has ended.
    """
    by_name = named(functions)
    columns = await asyncio.gather(*(_evaluate(name, one, samples, server) for name, one in by_name.items()))
    parts = tuple(
        {name: column[at] for name, column in zip(by_name, columns, strict=True)} for at in range(len(samples))
    )
    weights = {name: one.weight for name, one in by_name.items()}
    totals = tuple(combine_rewards(part, weights) for part in parts)
    failures: Counter[str] = Counter()
    timeouts = 0
    for at, part in enumerate(parts):
        for name, reward in part.items():
            if reward.failure is not None:
                failures[name] += 1
                timeouts += reward.timed_out
                _log.warning(
                    "reward function %r failed on sample %s: %s", name, labels[at] if labels else at, reward.failure
                )
    counters = {
        "reward_missing": sum(total.value is None for total in totals),
        "verifier_errors": failures.total(),
        "verifier_timeouts": timeouts,
    }
    return Rewards(totals, parts, counters, dict(failures))


async def _evaluate(
    name: str, one: RewardFunction, samples: Sequence[Mapping[str, Any]], server: WorkerServer
) -> list[RewardValue]:
    if not samples:
        return []
    wanted = [_arguments(name, one.function, sample) for sample in samples]
    if one.style == "batch":
        columns = {key: [sample[key] for sample in wanted] for key in wanted[0]}
        call = prepare(functools.partial(_call_batch, one.function), name)
        return await _call(server, call, (columns, len(samples)), one.timeout_s, len(samples))
    call = prepare(functools.partial(_call_one, one.function), name)
    values = await asyncio.gather(*(_call(server, call, (sample,), one.timeout_s, 1) for sample in wanted))
    return [value for [value] in values]


async def _call(
    server: WorkerServer, call: Any, arguments: tuple[Any, ...], timeout_s: float, count: int
) -> list[RewardValue]:
    try:
        values = await server.call(call, *arguments, timeout_s=timeout_s)
    except CallTimedOut as error:
        return [RewardValue(None, str(error), timed_out=True)] * count
    except CallFailed as error:
        _log.debug("%s", error.trace)
        return [RewardValue(None, str(error))] * count
    return [RewardValue(value, failure) for value, failure in values]


def _call_one(function: Callable[..., Any], arguments: dict[str, Any]) -> list[tuple[float | None, str | None]]:
    """Runs in the worker's child: only plain floats and texts leave it."""
    reward = normalise_reward(finished(function(**arguments)))
    return [(reward.value, reward.failure)]


def _call_batch(
    function: Callable[..., Any], arguments: dict[str, Any], count: int
) -> list[tuple[float | None, str | None]]:
    rewards = normalise_batch(finished(function(**arguments)), count)
    return [(reward.value, reward.failure) for reward in rewards]


def _arguments(name: str, function: Callable[..., Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `sample` that the function's signature names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins have none
        return dict(sample)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(sample)
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in by_name if p.default is p.empty and p.name not in sample]
    missing += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if missing:
        raise ValueError(
            f"reward function {name!r} asks for {missing[0]!r}, which cannot be given by name; "
            f"a sample has {', '.join(sorted(sample))}"
        )
    return {p.name: sample[p.name] for p in by_name if p.name in sample}
