"""How a policy loss is called, the library's own or a user's: what it may ask for, what it may return, what is wrong.

Every message about a loss ends with the signature that is expected of it.
"""

from __future__ import annotations

import difflib
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from hermes_jax.objectives.policy import Surrogate

ARRAYS = (
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "advantages",
    "loss_mask",
    "entropy",
    "segment_ids",
    "positions",
    "turn",
    "policy_version",
    "temperature",
)
"""The arrays that a policy loss may ask for by name, each `[rows, width]`; see `PolicyBatch`."""

_TRACED = (jax.errors.JAXTypeError, jax.errors.JAXIndexError, jax.errors.UnexpectedTracerError)
_METRIC = re.compile(r"[A-Za-z0-9_.-]+")


class LossError(ValueError):
    """A policy loss is not what it should be; the message shows the offending value and the expected signature."""


class Asked(NamedTuple):
    """What a policy loss asks for by name."""

    arrays: tuple[str, ...]
    options: tuple[str, ...]


def name_of(function: Callable[..., Any]) -> str:
    """The function's name for messages and formulas."""
    return str(
        getattr(function, "__name__", None) or getattr(getattr(function, "func", function), "__name__", "custom")
    )


def place_of(function: Callable[..., Any]) -> str:
    """`module:name` of a function."""
    inner = getattr(function, "func", function)
    return f"{getattr(inner, '__module__', '?')}:{getattr(inner, '__qualname__', name_of(function))}"


def complaint(function: Callable[..., Any], problem: str, known: Collection[str] = ()) -> LossError:
    """The error about a loss: where it is, what is wrong, what is expected."""
    options = f"\n  options by name: {', '.join(known)}; others keep their defaults" if known else ""
    return LossError(
        f"policy loss {place_of(function)} {problem}\n"
        f"  expected: def {name_of(function)}(logprobs, old_logprobs, advantages, ...) -> loss, or -> (loss, metrics)\n"
        f"  arrays by name, each [rows, width]: {', '.join(ARRAYS)}{options}\n"
        "  loss: per token, floating point, [rows, width]; the library masks it, adds it up and divides by counts of "
        "the whole update\n"
        "  metrics: a dict of arrays like the loss, or of scalars"
    )


def asked_for(function: Callable[..., Any], known: Collection[str]) -> Asked:
    """The arrays and options that a loss names; `known` are the options that there are.

    Raises:
        LossError: it is no function, or asks for something unknown without a default.
    """
    if not callable(function):
        raise LossError(f"a policy loss is a function, got {function!r} ({type(function).__name__})")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise complaint(function, f"has no signature that can be read ({error})", known) from error
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if nameless := [str(parameter) for parameter in parameters if parameter.kind not in by_name]:
        raise complaint(function, f"takes {', '.join(nameless)}: each argument needs a name of its own", known)
    names = {parameter.name: parameter.default is not inspect.Parameter.empty for parameter in parameters}
    given = {*ARRAYS, *known}
    if unknown := [name for name, has_default in names.items() if name not in given and not has_default]:
        near = difflib.get_close_matches(unknown[0], given, n=1)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise complaint(function, f"asks for {', '.join(unknown)}, which there is not{guess}", known)
    return Asked(tuple(n for n in names if n in ARRAYS), tuple(n for n in names if n in known))


def call_loss(
    function: Callable[..., Any],
    arrays: Mapping[str, Array | None],
    options: Mapping[str, Any],
    shape: tuple[int, ...],
) -> Surrogate:
    """The loss per token of a batch, and its metrics.

    Args:
        function: returns a `Surrogate`, a loss per token, or (loss per token, metrics).
        arrays: those that it asks for; None = the batch has none.
        options: those that it asks for.
        shape: of all arrays of the batch.

    Raises:
        LossError: it fails, or returns something else.
    """
    if missing := [name for name, array in arrays.items() if array is None]:
        raise complaint(function, f"asks for {', '.join(missing)}, which this batch does not have")
    try:
        result = function(**arrays, **options)
    except Exception as error:  # whatever a user's code may raise
        raise complaint(function, _failure(function, error)) from error
    loss, metrics = _parts(function, result)
    _check_loss_array(function, loss, shape)
    if not isinstance(result, Surrogate):
        result = Surrogate(jnp.asarray(loss))
    return result._replace(metrics=_checked_metrics(function, metrics, shape))


def _parts(function: Callable[..., Any], result: Any) -> tuple[Any, Mapping[str, Any]]:
    if isinstance(result, Surrogate):
        return result.loss, result.metrics or {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result[0], result[1]
    if isinstance(result, tuple):
        raise complaint(
            function,
            f"returns {_shown(result)}: a pair is (loss per token, dict of metrics). It can't be a sum and a "
            "denominator, since the denominators are those of the whole update, of which it sees a part",
        )
    return result, {}


def _check_loss_array(function: Callable[..., Any], loss: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(loss, jax.Array) and not hasattr(loss, "dtype"):
        raise complaint(function, f"returns {_shown(loss)}, which is no array")
    if jnp.shape(loss) != shape:
        raise complaint(function, f"returns a loss of shape {jnp.shape(loss)}, not {shape} as its arrays have")
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise complaint(function, f"returns a loss of dtype {loss.dtype}, which is not floating point")


def _checked_metrics(
    function: Callable[..., Any], metrics: Mapping[str, Any], shape: tuple[int, ...]
) -> dict[str, Array] | None:
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not _METRIC.fullmatch(name):
            raise complaint(function, f"has a metric named {name!r}: use letters, digits, '_', '-' and '.'")
        if jnp.shape(value) not in ((), shape):
            raise complaint(function, f"has a metric {name!r} of shape {jnp.shape(value)}, not {shape} or ()")
        found[name] = lax.stop_gradient(jnp.broadcast_to(jnp.asarray(value, jnp.float32), shape))
    return found or None


def _failure(function: Callable[..., Any], error: Exception) -> str:
    """What a loss raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(getattr(function, "func", function), "__code__", None)
    own = [f for f in frames if code is not None and f.filename == code.co_filename and f.name == code.co_name]
    where = f" in line {own[-1].lineno} ({own[-1].line})" if own else ""
    said = str(error).split("\n")[0]
    if isinstance(error, _TRACED):
        return (
            f"can't be compiled{where}: it uses the value of an array in Python (if, float(), numpy, ...), but is "
            f"traced once by jax.jit, where arrays have no values yet; use jnp.where and other jax.numpy functions "
            f"({type(error).__name__}: {said})"
        )
    return f"fails{where}: {type(error).__name__}: {said}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    if hasattr(value, "shape"):
        return f"an array of shape {jnp.shape(value)}"
    return f"{value!r} ({type(value).__name__})"
