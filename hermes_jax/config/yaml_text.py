"""YAML 1.2 with places: `1e-3` is a number, `no` is text, a repeated key is an error, every key knows its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

Key = tuple[str, ...]


class ConfigError(ValueError):
    """What is wrong in a configuration, where, and what to do; one line per problem."""


class _Loader(yaml.SafeLoader):
    """Knows only the scalars that are declared below."""


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
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        value = {} if node is None else _construct(loader, node, (), places, str(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()
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
    return yaml.load(text, Loader=_Loader)


def write_value(value: Any) -> str:
    """YAML for one value; reads back to the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
