"""Checks a call's arguments against the JSON schema of its tool, without converting anything."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_CHECKED = {"type", "properties", "required", "additionalProperties", "items", "enum", "minimum", "maximum"}
_FOR_READERS = {"description", "title", "default", "examples"}


def check_schema(tool: str, schema: Mapping[str, Any]) -> None:
    """Refuses schemas that `argument_error` would only half check.

    Raises:
        ValueError: names the tool, the place and the keyword.
    """
    if schema.get("type") != "object":
        raise ValueError(
            f"parameters of tool {tool!r} must be a JSON schema of type object, got {schema.get('type')!r}"
        )
    _check_schema(tool, schema, "parameters")


def _check_schema(tool: str, schema: Mapping[str, Any], where: str) -> None:
    unknown = sorted(set(schema) - _CHECKED - _FOR_READERS)
    if unknown:
        raise ValueError(
            f"tool {tool!r}: {where} uses the schema keyword {unknown[0]!r}, which is not checked; "
            f"known: {', '.join(sorted(_CHECKED))}"
        )
    for name in _type_names(schema):
        if name not in _TYPES:
            raise ValueError(f"tool {tool!r}: {where} has the unknown type {name!r}; known: {', '.join(_TYPES)}")
    for name, inner in schema.get("properties", {}).items():
        _check_schema(tool, inner, f"{where}.{name}")
    missing = [name for name in schema.get("required", ()) if name not in schema.get("properties", {})]
    if missing:
        raise ValueError(f"tool {tool!r}: {where} requires {missing[0]!r} but does not describe it")
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), Mapping):
            _check_schema(tool, schema[keyword], f"{where}.{keyword}")


def argument_error(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments, in words for the model; "" if nothing is.

    Stricter than JSON Schema: 1.0 is no integer, and properties that the schema does not name are wrong unless
    `additionalProperties` allows them (an inner object without any named property takes all).
    """
    return _object_error(schema, arguments, "")


def _error(schema: Mapping[str, Any], value: Any, where: str) -> str:
    names = _type_names(schema)
    if names and not any(_is_a(value, name) for name in names):
        return f"{where} must be {' or '.join(_article(name) for name in names)}, got {_shown(value)}"
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        return f"{where} must be one of {schema['enum']}, got {_shown(value)}"
    if _is_a(value, "number"):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if not low <= value <= high:
            return f"{where} must lie between {low:g} and {high:g}, got {value!r}"
    if isinstance(value, dict):
        return _object_error(schema, value, where)
    if isinstance(value, list) and "items" in schema:
        errors = (_error(schema["items"], item, f"{where}[{at}]") for at, item in enumerate(value))
        return next(filter(None, errors), "")
    return ""


def _object_error(schema: Mapping[str, Any], value: Mapping[str, Any], where: str) -> str:
    properties: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"{_inside(where, name)} is missing"
    more = schema.get("additionalProperties", not properties and where != "")
    for name, inner in value.items():
        if name in properties:
            wrong = _error(properties[name], inner, _inside(where, name))
        elif isinstance(more, Mapping):
            wrong = _error(more, inner, _inside(where, name))
        else:
            wrong = "" if more else _unknown(name, properties, where)
        if wrong:
            return wrong
    return ""


def _unknown(name: str, properties: Mapping[str, Any], where: str) -> str:
    near = difflib.get_close_matches(name, properties, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(properties) or 'none'}"
    return f"{_inside(where, name)} is unknown; {hint}"


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else repr(name)


def _type_names(schema: Mapping[str, Any]) -> tuple[str, ...]:
    names = schema.get("type", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])


def _article(name: str) -> str:
    return "null" if name == "null" else f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def _shown(value: Any) -> str:
    kind = next((name for name in _TYPES if _is_a(value, name)), type(value).__name__)
    text = repr(value)
    return f"{_article(kind)}: {text if len(text) <= 60 else text[:57] + '...'}"
