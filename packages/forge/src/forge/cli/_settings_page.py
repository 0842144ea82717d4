"""Settings classes of all verbs → the page docs/settings.md, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import attrs

from forge.cli._options import field_texts
from forge.settings._backends import backend_class, shipped_names
from forge.settings._settings import groups
from forge.verbs._registry import VERBS, task_of


def settings_page() -> str:
    """Write the settings of every verb as Markdown: those that all have, then each verb's own."""
    lines = [
        "# Settings",
        "",
        "Generated from the settings classes by `hatch run settings`. In Python a setting is `forge.VERB(name=value)`, in",
        "a shell `--name value` with dashes, in a YAML recipe `name: value`. `forge VERB RECIPE.yaml --name value` overrides",
        "a recipe; the `config.yaml` of a run is a recipe too.",
        "",
        f"Verbs: {', '.join(f'[`{name}`](#forge-{name})' for name in VERBS)}.",
    ]
    tasks = [task_of(name) for name in VERBS]
    differing = {"data", "objective"}
    lines += ["", "## Every verb"]
    for group, owner in groups(tasks[0].settings).items():
        if group not in differing:
            lines += _table(group, owner, "###")
    shown: dict[type, str] = {}
    for task in tasks:
        lines += ["", f"## forge {task.name}", "", task.about]
        for group in sorted(differing):
            owner = groups(task.settings)[group]
            first = shown.setdefault(owner, task.name)
            same = ["", f"{group.capitalize()} settings: those of [forge {first}](#forge-{first})."]
            lines += _table(group, owner, "###") if first == task.name else same
    lines += ["", "## Backends", "", "With `backend=NAME` a verb has these settings too."]
    for name in shipped_names():
        own = backend_class(name).Settings
        lines += [] if own is None else _table(f"backend={name}", own, "###", capital=False)
    return "\n".join([*lines, ""])


def _table(group: str, owner: type, level: str, *, capital: bool = True) -> list[str]:
    """Write the settings of one class as a table below a heading."""
    attrs.resolve_types(owner)
    return [
        "",
        f"{level} {group.capitalize() if capital else group}",
        "",
        f"`{owner.__module__.split('.')[0]}.{owner.__name__}`",
        "",
        "| setting | type | default | |",
        "|---|---|---|---|",
        *(
            f"| `{field.name}` | {_kind(field.type)} | {_default(field)} | {field_texts(owner)[field.name]} |"
            for field in attrs.fields(owner)
        ),
    ]


def _kind(kind: Any) -> str:
    """Describe a type in Markdown."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {_kind(get_args(kind)[0])}"
    if get_origin(kind) is Mapping:
        return f"mapping of {' to '.join(map(_kind, get_args(kind)))}"
    options = [option for option in get_args(kind) if option is not type(None)]
    if options:
        return ", ".join(_kind(option) for option in options)
    return {str: "string", int: "whole number", float: "number", bool: "true or false", Any: "any value"}[kind]


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    return "" if field.default is None else f"`{field.default}`"


if __name__ == "__main__":
    print(settings_page(), end="")
