"""JSON as tool calls need it: strict, finite, bounded in depth, and found in text in linear time.

`json` alone won't do for text from a model: it accepts NaN, overflows to infinity, runs into the recursion limit, and
counts the lines of the whole document for each error message, which makes many failed attempts quadratic.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple, NoReturn

MAX_DEPTH = 256
"""Deepest nesting of arrays and objects that is read; far from the recursion limit of every Python version."""

_TOKEN = re.compile(
    r"""[ \t\n\r]*+(?:
        (?P<open>[{\[]) | (?P<close>[}\]])
        | (?P<between>[,:])
        | (?P<value>"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+" | [-+.0-9a-zA-Z]++)
    )""",
    re.VERBOSE,
)
_CUT_OFF = re.compile(r'[ \t\n\r]*+(?:"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+\\?)?\Z')
_ANY = ("open", "close", "between", "value")
_AFTER_VALUE = ("close", "between")
_SPACE = " \t\n\r"


class Extent(NamedTuple):
    """How far a JSON object reaches.

    Args:
        end: where it ends (exclusive); None if it does not.
        depth: its deepest nesting.
        cut_off: it does not end because the text ends.
    """

    end: int | None
    depth: int
    cut_off: bool = False


def extent(text: str, start: int) -> Extent:
    """How far the JSON object or array reaches that opens at `start`.

    Knows strings, so that braces and tags inside them count for nothing. Of the grammar it checks only that two values
    never stand side by side, which tells text from strings where a quote is missing; the rest is for `loads_object`.
    """
    depth, deepest, at = 0, 0, start
    allowed: tuple[str, ...] = ("open",)
    while (token := _TOKEN.match(text, at)) and (kind := token.lastgroup or "") in allowed:
        at = token.end()
        depth += (kind == "open") - (kind == "close")
        deepest = max(deepest, depth)
        if depth == 0:
            return Extent(at, deepest)
        allowed = _AFTER_VALUE if kind in ("value", "close") else _ANY
    return Extent(None, deepest, _CUT_OFF.match(text, at) is not None)


def loads_object(text: str) -> dict[str, Any]:
    """Parses a strict JSON object. Later duplicates of a key win; integers are exact.

    Raises:
        ValueError: not strict JSON, not an object, a number that is not finite, nesting above `MAX_DEPTH`, or a string
            that UTF-8 can't carry (half of a surrogate pair); the message says which.
    """
    text = text.strip(_SPACE)
    if not text.startswith("{"):
        raise ValueError("there is no JSON object")
    found = extent(text, 0)
    if found.depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    try:
        value: dict[str, Any] = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error.msg} at character {error.pos}") from None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair") from None
    return value


def call_arguments(value: Any) -> dict[str, Any]:
    """The arguments of a call from what stands there: an object, or a string that holds one; nothing means none.

    Raises:
        ValueError: anything else.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            return loads_object(value)
        except ValueError as error:
            raise ValueError(f'"arguments" must be a JSON object; the string that stands there: {error}') from None
    if not isinstance(value, dict):
        raise ValueError(f'"arguments" must be a JSON object, not {_kind(value)}')
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _kind(value: Any) -> str:
    names = {list: "an array", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "this")
