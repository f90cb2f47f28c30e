"""Gradients by finite differences, with whatever stands under `stop_gradient` held fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np


def held_fixed(function: Callable[[Any], Any], at: Any) -> Callable[[Any], Any]:
    """`function` of one array, where every `stop_gradient(x)` keeps the value that it has at `at`.

    So its derivative is what autodiff calls the gradient of `function`. Inside loops and custom derivatives nothing is
    held.
    """
    closed = jax.make_jaxpr(function)(at)
    fixed: list[Any] = []

    def remember(value: Any) -> Any:
        fixed.append(value)
        return value

    _run(closed, [at], remember)

    def again(x: Any) -> Any:
        values = iter(fixed)
        return _run(closed, [x], lambda _: next(values))[0]

    return again


def differences(function: Callable[[Any], Any], at: Any, step: float) -> tuple[np.ndarray, np.ndarray]:
    """(slope ahead, slope behind) of a scalar function, element by element of `at`."""
    compiled = jax.jit(function)
    start, x = float(compiled(at)), np.asarray(at)
    ahead, behind = np.zeros(x.shape), np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        for slopes, move in ((ahead, step), (behind, -step)):
            moved = x.copy()
            moved[place] += move
            slopes[place] = (float(compiled(moved)) - start) / move
    return ahead, behind


def _run(closed: jex.ClosedJaxpr, arguments: Sequence[Any], stop: Callable[[Any], Any]) -> list[Any]:
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    values |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))
    for equation in closed.jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        values |= dict(zip(equation.outvars, _apply(equation, given, stop), strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _apply(equation: Any, given: list[Any], stop: Callable[[Any], Any]) -> list[Any]:
    primitive = equation.primitive
    if primitive.name == "stop_gradient":
        return [stop(given[0])]
    if primitive.name in ("jit", "pjit"):
        return _run(equation.params["jaxpr"], given, stop)
    bound = primitive.get_bind_params(equation.params)  # a pair with functions before jax 0.10.2
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    result = primitive.bind(*functions, *given, **params)
    return list(result) if primitive.multiple_results else [result]
