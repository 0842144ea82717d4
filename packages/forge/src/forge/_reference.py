"""Settings classes → the words that explain them: help texts, and the page docs/settings.md."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin

import attrs
import docstring_parser

from forge._settings import SFTSettings, dashed, flat_fields, groups


@cache
def field_texts(owner: type) -> dict[str, str]:
    """Field name → the docstring written under it in an attrs class."""
    return {
        param.arg_name: " ".join((param.description or "").split())
        for param in docstring_parser.parse_from_object(owner).params
    }


def settings_page(settings_class: type = SFTSettings, call: str = "sft") -> str:
    """Write the reference of a composed settings class as Markdown."""
    lines = [
        f"# Settings of `forge.{call}` and `forge {call}`",
        "",
        f"Generated from the settings classes by `hatch run docs`. In Python `forge.{call}(name=value)`, in a shell `--name value` with dashes,",
        f"in a YAML recipe `name: value`. `forge {call} RECIPE.yaml --name value` overrides a recipe; a run's own `config.yaml` is one.",
    ]
    for group, owner in groups(settings_class).items():
        lines += ["", f"## {group.capitalize()} (`{owner.__module__.split('.')[0]}.{owner.__name__}`)", ""]
        lines += ["| setting | type | default | |", "|---|---|---|---|"]
        fields = [field for own, field in flat_fields(settings_class) if own == group]
        lines += [
            f"| `{field.name}` | {_kind(field.type)} | {_default(field)} | {field_texts(owner)[field.name]} |"
            for field in fields
        ]
    lines += [
        "",
        f"On the command line: {', '.join(f'`--{dashed(field.name)}`' for _, field in flat_fields(settings_class))}.",
        "",
    ]
    return "\n".join(lines)


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "list of strings"
    options = [option for option in get_args(kind) if option is not type(None)]
    if options:
        return ", ".join(_kind(option) for option in options)
    return {str: "string", int: "whole number", float: "number", bool: "true or false"}[kind]


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    return "" if field.default is None else f"`{field.default}`"


if __name__ == "__main__":
    print(settings_page(), end="")
