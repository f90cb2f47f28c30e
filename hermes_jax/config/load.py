"""From files and overrides to a checked `Config`: layers, other names, unknown keys, places in every message."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hermes_jax.config import overrides as cli
from hermes_jax.config.blocks_run import ModelConfig
from hermes_jax.config.fields import Block, block_type, bounds_in_words, type_in_words
from hermes_jax.config.presets import PRESETS
from hermes_jax.config.rules import ALIASES, GONE, set_by_user, unused
from hermes_jax.config.schema import Config
from hermes_jax.config.yaml_text import ConfigError, Key, read_file

Layer = tuple[dict[str, Any], dict[Key, str]]


def load(*files: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads config files, later ones winning, then overrides.

    A file may name another one that it builds on: `base: ../envs/terminal_test/default.yaml` (relative to itself).

    Args:
        files: YAML files.
        overrides: as on a command line: `env.group_size=8`, `--env.group_size 8`.

    Raises:
        ConfigError: one line per problem: where, what, and what to do.
    """
    layers = [layer for file in files for layer in _with_bases(Path(file), ())]
    return _build([*layers, cli.parse(overrides)])


def build(options: Mapping[str, Any], where: str = "argument") -> Config:
    """A checked config from nested mappings; the same rules as `load`."""
    return _build([(dict(options), dict.fromkeys(_paths(options), where))])


def _with_bases(file: Path, children: tuple[Path, ...]) -> Iterator[Layer]:
    file = file.resolve() if children else file
    if file.resolve() in children:
        raise ConfigError(f"{children[-1]}: `base` leads back to {file}")
    tree, places = read_file(file)
    base = tree.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{places[('base',)]}: `base` needs the path of another config file, got {base!r}")
        yield from _with_bases(file.parent / base, (*children, file.resolve()))
    yield tree, places


def _paths(tree: Mapping[str, Any], prefix: Key = ()) -> Iterator[Key]:
    for key, value in tree.items():
        yield (*prefix, key)
        if isinstance(value, Mapping):
            yield from _paths(value, (*prefix, key))


def _build(layers: Sequence[Layer]) -> Config:
    merged: dict[str, Any] = {}
    places: dict[Key, str] = {}
    layer_of: dict[str, int] = {}
    problems: list[str] = []
    canonical = [_canonical(*layer, problems) for layer in layers]
    for number, (tree, tree_places) in enumerate(part for layer in canonical for part in _without_preset(*layer)):
        problems.extend(_unknown(tree, Config, (), tree_places))
        _merge(merged, tree)
        places.update(tree_places)
        layer_of.update(dict.fromkeys(map(".".join, tree_places), number))
    _raise(problems)
    _fit_context(merged)
    config = _validate(merged, places)
    _raise(_not_built(config, places))
    for path in _switched_off(config, layer_of):
        _take(merged, tuple(path.split(".")))
    config = _validate(merged, places)
    _raise(_without_effect(config, places))
    return config


def _fit_context(merged: dict[str, Any]) -> None:
    """Sets `model.context_length`, where nobody has, to what the model of `model.path` can hold if that is less.

    A folder that can't be read keeps the default: whoever reads the model says what is wrong with it.
    """
    model = merged.get("model")
    if not isinstance(model, dict) or "context_length" in model or not isinstance(model.get("path"), str):
        return
    try:
        positions = json.loads((Path(model["path"]) / "config.json").read_bytes())["max_position_embeddings"]
    except (OSError, ValueError, TypeError, KeyError):
        return
    field = ModelConfig.model_fields["context_length"]
    if type(positions) is int and positions < field.default:
        model["context_length"] = positions


def _raise(problems: Iterable[str]) -> None:
    if text := "\n".join(problems):
        raise ConfigError(text)


def _validate(merged: dict[str, Any], places: Mapping[Key, str]) -> Config:
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(_in_words(detail, places) for detail in error.errors())) from None


def _switched_off(config: Config, layer_of: Mapping[str, int]) -> Iterator[str]:
    """Options without effect because a later layer switched off what an earlier one had set up; they are forgotten."""
    rules = unused(config)
    for path in set_by_user(config):
        switches = rules[path].switches if path in rules else ()
        if any(layer_of.get(switch, -1) > layer_of[path] for switch in switches):
            yield path


def _canonical(tree: dict[str, Any], places: dict[Key, str], problems: list[str]) -> Layer:
    """Replaces other names by ours; one option under two names in one layer is a problem."""
    tree, places = _copy(tree), dict(places)
    for alias, name in ALIASES.items():
        source, target = tuple(alias.split(".")), tuple(name.split("."))
        value = _take(tree, source)
        if value is _ABSENT:
            continue
        where = places.get(source, "argument")
        if _get(tree, target) is not _ABSENT:
            problems.append(f"{where}: `{alias}` and `{name}` are the same option and both given; remove one")
            continue
        _put(tree, target, value)
        places[target] = where
    return tree, places


def _without_preset(tree: dict[str, Any], places: dict[Key, str]) -> Iterator[Layer]:
    """A layer with a preset as two: the preset's values, then the layer's own, which win."""
    path = ("grpo", "preset")
    values = PRESETS.get(str(_get(tree, path)))
    if values is not None:
        where = places.pop(path, "argument")
        _take(tree, path)
        yield {"grpo": dict(values)}, {("grpo", name): where for name in values}
    yield tree, places


_ABSENT = object()


def _get(tree: Any, path: Key) -> Any:
    for part in path:
        if not isinstance(tree, dict) or part not in tree:
            return _ABSENT
        tree = tree[part]
    return tree


def _take(tree: dict[str, Any], path: Key) -> Any:
    parent = _get(tree, path[:-1])
    value = parent.pop(path[-1], _ABSENT) if isinstance(parent, dict) else _ABSENT
    if value is not _ABSENT and not parent and len(path) > 1 and path[0] not in Config.model_fields:
        tree.pop(path[0])
    return value


def _put(tree: dict[str, Any], path: Key, value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[path[-1]] = value


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = _copy(value) if isinstance(value, Mapping) else value


def _unknown(tree: dict[str, Any], block: type[Block], prefix: Key, places: Mapping[Key, str]) -> Iterator[str]:
    """One message per key that is no option; empty blocks (`mesh:` and nothing more) are removed."""
    for key in list(tree):
        path, field = (*prefix, key), block.model_fields.get(key)
        if field is None:
            yield f"{places.get(path, 'argument')}: {_unknown_in_words(path, block)}"
            continue
        inner = block_type(field)
        if inner is None:
            continue
        if tree[key] is None:
            del tree[key]
        elif isinstance(tree[key], dict):
            yield from _unknown(tree[key], inner, path, places)


def _unknown_in_words(path: Key, block: type[Block]) -> str:
    name = ".".join(path)
    if name in GONE:
        return f"`{name}` is an option of Hermes that does not exist here: {GONE[name]}"
    elsewhere = {option: option.rpartition(".")[2] for option in option_paths()}
    exact = [option for option, last in elsewhere.items() if last == path[-1]]
    if exact:
        return f"unknown key `{name}`; did you mean `{exact[0]}`?"
    prefix = ".".join(path[:-1])
    known = {(f"{prefix}." if prefix else "") + field: field for field in block.model_fields}
    known |= {alias: alias.rpartition(".")[2] for alias in ALIASES if alias.rpartition(".")[0] == prefix}
    near = difflib.get_close_matches(path[-1], known.values(), n=1, cutoff=0.6)
    if near:
        return f"unknown key `{name}`; did you mean `{next(p for p, f in known.items() if f == near[0])}`?"
    near = difflib.get_close_matches(path[-1], elsewhere.values(), n=1, cutoff=0.8)
    if near:
        return f"unknown key `{name}`; did you mean `{next(p for p, f in elsewhere.items() if f == near[0])}`?"
    return f"unknown key `{name}`; {prefix or 'the top level'} knows: {', '.join(sorted(known.values()))}"


def option_paths(block: type[Block] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all options."""
    for name, field in block.model_fields.items():
        inner = block_type(field)
        if inner is None:
            yield prefix + name
        else:
            yield from option_paths(inner, f"{prefix}{name}.")


def _in_words(detail: ErrorDetails, places: Mapping[Key, str]) -> str:
    """One of pydantic's errors with its place, what is needed and what came."""
    loc = tuple(str(part) for part in detail["loc"])
    if not loc:
        return str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"]
    block: type[Block] = Config
    for depth, part in enumerate(loc):
        field = block.model_fields[part]
        inner = block_type(field)
        if inner is None or depth == len(loc) - 1:
            break
        block = inner
    path = loc[: depth + 1]
    need = "a mapping of options" if inner else type_in_words(field.annotation)
    bounds = bounds_in_words(field)
    got = detail["input"]
    came = f"{got!r} ({'null' if got is None else type(got).__name__})"
    return f"{_place(path, places)}: `{'.'.join(path)}` needs {need}{', ' + bounds if bounds else ''}; got {came}"


def _place(path: Key, places: Mapping[Key, str]) -> str:
    return next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), "argument")


def _without_effect(config: Config, places: Mapping[Key, str]) -> Iterator[str]:
    rules = unused(config)
    for path in set_by_user(config):
        if path in rules:
            where = _place(tuple(path.split(".")), places)
            yield f"{where}: `{path}` has no effect: {rules[path].reason}; remove it or change that"


def _not_built(config: Config, places: Mapping[Key, str]) -> Iterator[str]:
    if config.openai.server_type != "jax":
        where = _place(("openai", "server_type"), places)
        yield (
            f"{where}: `openai.server_type: {config.openai.server_type}` is not part of this version; use "
            "`openai.server_type: jax`, the engine inside the trainer, and remove base_url, model_name and api_key"
        )
