"""YAML 1.2 with places: `1e-3` is a number, `no` is text, a repeated key is an error, every key knows its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Key = tuple[str, ...]


class ConfigError(ValueError):
    """What is wrong in a configuration, where, and what to do; one line per problem."""


class _Loader(yaml.SafeLoader):
    """Knows only the scalars that are declared below, and no mapping that repeats a key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is given twice", key.start_mark)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    pass


_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(node.value).replace("_", "")))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def read_file(path: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    """Reads a YAML file of nested mappings.

    Returns:
        the mapping, and for every key path the place where it stands ("file:line").

    Raises:
        ConfigError: the file can't be read, is no YAML, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't read this config file: {error}") from error
    places: dict[Key, str] = {}
    try:
        value = _load(text, lambda loader, node: _construct(loader, node, (), places, str(path)), empty={})
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if value is None:
        return {}, places
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a config file holds a mapping of options, got {type(value).__name__}")
    return value, places


def _construct(loader: _Loader, node: yaml.Node, path: Key, places: dict[Key, str], file: str) -> Any:
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, place = str(key_node.value), f"{file}:{key_node.start_mark.line + 1}"
        if key in result:
            raise ConfigError(f"{place}: `{'.'.join((*path, key))}` is given twice in this file; remove one")
        places[(*path, key)] = place
        result[key] = _construct(loader, value_node, (*path, key), places, file)
    return result


def parse_value(text: str) -> Any:
    """One YAML value, as on the right of `key=`.

    Raises:
        yaml.YAMLError: no valid YAML.
    """
    return _load(text, lambda loader, node: loader.construct_object(node, deep=True), empty=None)


def _load(text: str, construct: Callable[[_Loader, yaml.Node], Any], empty: Any) -> Any:
    """The one document in a text; whatever is wrong with it is a YAMLError, also where PyYAML lets others through."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return empty if node is None else construct(loader, node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply, or holds an alias of itself") from error
    except (yaml.YAMLError, ConfigError):
        raise
    except (ValueError, KeyError, AttributeError, TypeError) as error:  # of a tag's constructor: `!!float x`
        raise yaml.YAMLError(f"a value does not fit its tag: {error}") from error


def write_value(value: Any) -> str:
    """YAML for one value; reads back to the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
