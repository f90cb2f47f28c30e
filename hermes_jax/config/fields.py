"""How an option is declared: a default, one line of help, a unit; and how its type reads in plain words."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


class Block(BaseModel):
    """A group of options. Frozen; no conversions between types; unknown keys are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def option(default: Any, help: str, unit: str = "", **bounds: Any) -> Any:
    """One option of a block.

    Args:
        default: value when the user says nothing.
        help: one line for `--help-config`; says the meaning of special values such as null or 0.
        unit: what the number counts ("tokens", "s"); empty where there is none.
        bounds: pydantic's `ge`, `gt`, `le`, `lt`.
    """
    return Field(default=default, description=help, json_schema_extra={"unit": unit}, **bounds)


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_to_tuple)]
"""A YAML list of texts."""
Counts = Annotated[tuple[int, ...], BeforeValidator(_to_tuple)]
"""A YAML list of integers."""

_PLAIN = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def type_in_words(annotation: Any) -> str:
    """ "an integer or null" for `int | None`, and so on, for help and error messages."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_in_words(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return " or ".join(type_in_words(part) for part in get_args(annotation))
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if origin is tuple:
        return "a list of " + {int: "integers", str: "texts"}.get(get_args(annotation)[0], "values")
    if origin is dict or annotation is dict:
        return "a mapping"
    return _PLAIN.get(annotation, str(annotation))


def accepts(annotation: Any, kind: type) -> bool:
    """True if a value of this Python type may stand for the option, apart from bounds."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return accepts(get_args(annotation)[0], kind)
    if origin in (Union, types.UnionType):
        return any(accepts(part, kind) for part in get_args(annotation))
    if origin is Literal:
        return any(type(choice) is kind for choice in get_args(annotation))
    return annotation is kind


def bounds_in_words(field: FieldInfo) -> str:
    """ ">= 1, <= 8" for an option with such bounds, empty without."""
    signs = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
    known = [(*signs[type(bound)], bound) for bound in field.metadata if type(bound) in signs]
    return ", ".join(f"{sign} {getattr(bound, name)}" for sign, name, bound in known)


def unit_of(field: FieldInfo) -> str:
    """The unit given to `option`."""
    extra = field.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, Mapping) else ""


def block_type(field: FieldInfo) -> type[Block] | None:
    """The block class if the field holds a block of options, else None."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Block) else None
