"""A configuration as text: the resolved YAML of a run, and `--help-config`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from hermes_jax.config.fields import Block, block_type, bounds_in_words, type_in_words, unit_of
from hermes_jax.config.presets import PRESETS
from hermes_jax.config.rules import ALIASES, Use, unused
from hermes_jax.config.schema import Config
from hermes_jax.config.yaml_text import write_value

SECRET = "openai.api_key"
_END = "...\n"
"""What YAML writes after a single value."""


def dump(config: Config) -> str:
    """The whole configuration as YAML, defaults included; `load` reads it back to an equal `Config`.

    Options without effect in this configuration are comments (given explicitly they would be errors). A key for a
    server is never written.
    """
    lines = ["# Resolved configuration. Options without effect here are comments that say why."]
    lines += _dump(config, "", 0, unused(config))
    return "\n".join(lines) + "\n"


def _dump(block: Block, prefix: str, depth: int, without_effect: Mapping[str, Use]) -> Iterator[str]:
    indent = "  " * depth
    for name, field in type(block).model_fields.items():
        path, value = prefix + name, getattr(block, name)
        if block_type(field):
            body = list(_dump(value, f"{path}.", depth + 1, without_effect))
            yield f"{indent}{name}:"
            yield from body
            continue
        value = list(value) if isinstance(value, tuple) else value
        hidden = path == SECRET and value is not None
        text = write_value({name: "(not written)" if hidden else value}).rstrip("\n")
        reason = "secret" if hidden else without_effect[path].reason if path in without_effect else None
        mark = "" if reason is None else "# "
        yield from (indent + mark + line for line in text.splitlines())
        if reason is not None:
            yield f"{indent}#   ({reason})"


def help_config() -> str:
    """Every option with type, default, unit and help, for `--help-config`."""
    parts = ["Options: in a YAML file, or as key.sub=value after the command (--key.sub value works too).", ""]
    parts += _help(Config, "")
    parts += ["Other names (Hermes' documentation):"]
    parts += [f"  {alias} = {name}" for alias, name in ALIASES.items()]
    parts += ["", "Presets (grpo.preset) and the values of the grpo block that they stand for:"]
    for name, values in PRESETS.items():
        meant = ", ".join(f"{key}: {write_value(value).removesuffix(_END).strip()}" for key, value in values.items())
        parts.append(textwrap.fill(f"{name} = {meant}", 110, initial_indent="  ", subsequent_indent="      "))
    return "\n".join(parts) + "\n"


def _help(block: type[Block], prefix: str) -> Iterator[str]:
    for name, field in block.model_fields.items():
        if block_type(field) is None:
            bounds, unit = bounds_in_words(field), unit_of(field)
            words = type_in_words(field.annotation) + (f", {bounds}" if bounds else "") + (f" [{unit}]" if unit else "")
            default = write_value(_plain(field.default)).removesuffix(_END).strip()
            yield f"{prefix}{name}: {words}; default {default}"
            yield textwrap.fill(field.description or "", 110, initial_indent="    ", subsequent_indent="    ")
    yield ""
    for name, field in block.model_fields.items():
        inner = block_type(field)
        if inner is not None:
            title = " ".join((inner.__doc__ or "").split())
            yield textwrap.fill(f"[{prefix}{name}] {title}", 114)
            yield from _help(inner, f"{prefix}{name}.")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
