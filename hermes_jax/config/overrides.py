"""Command-line overrides: `key.sub=value`, `--key.sub=value`, `--key.sub value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from hermes_jax.config.fields import accepts, block_type
from hermes_jax.config.rules import ALIASES
from hermes_jax.config.schema import Config
from hermes_jax.config.yaml_text import ConfigError, Key, parse_value

_NULLS = ("", "~", "null", "Null", "NULL")


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[Key, str]]:
    """Turns overrides into the same form as a file: nested mapping, and the place of every key.

    Raises:
        ConfigError: an argument is no override, or its value no YAML.
    """
    tree: dict[str, Any] = {}
    places: dict[Key, str] = {}
    for key, text in _pairs(arguments):
        path, place = tuple(key.split(".")), f"override {key}={text}"
        _insert(tree, path, _value(path, text, place), place)
        places.update({path[: i + 1]: place for i in range(len(path))})
    return tree, places


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    pairs, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, text = argument.partition("=")
        dashed = key.startswith("--")
        key = key[2:] if dashed else key
        if not key or key.startswith("-") or not all(part and not part.isspace() for part in key.split(".")):
            raise ConfigError(f"`{argument}` is no override: write key.sub=value, such as env.group_size=8")
        if not equals:
            if not dashed or not rest or rest[0].startswith("--"):
                raise ConfigError(f"`{argument}` has no value: write {key}=value, such as env.group_size=8")
            text = rest.pop(0)
        if not _is_text(key + text):
            raise ConfigError(f"{argument!r} is no override: it holds bytes that are no UTF-8")
        pairs.append((key, text))
    return pairs


def _is_text(text: str) -> bool:
    """Whether UTF-8 can carry it: bytes of the command line that are none arrive as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _insert(tree: dict[str, Any], path: Key, value: Any, place: str) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{place}: `{part}` was already given a value in an earlier override")
    tree[path[-1]] = value


def _value(path: Key, text: str, place: str) -> Any:
    """The YAML value of `text`; where the option holds text, that text as it stands (`openai.api_key=123`).

    Quoted text is YAML there too, and null is null where the option may be null.
    """
    annotation = _annotation(path)
    is_text = annotation is not None and accepts(annotation, str)
    may_be_null = annotation is not None and accepts(annotation, type(None))
    quoted = text.strip()[:1] in ("'", '"')
    if is_text and not quoted and not (may_be_null and text.strip() in _NULLS):
        return text
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        if is_text:
            return text
        raise ConfigError(f"{place}: the value is not valid YAML: {' '.join(str(error).split())}") from error
    return value if not is_text or isinstance(value, str) or value is None else text


def _annotation(path: Key) -> Any:
    path = tuple(ALIASES.get(".".join(path), ".".join(path)).split("."))
    block: type | None = Config
    for part in path[:-1]:
        field = block.model_fields.get(part) if block else None  # type: ignore[attr-defined]
        block = block_type(field) if field else None
    field = block.model_fields.get(path[-1]) if block else None  # type: ignore[attr-defined]
    return field.annotation if field and not block_type(field) else None
