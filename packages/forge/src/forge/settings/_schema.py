"""Settings class of a verb → a JSON schema (draft 2020-12) of its recipes, for editors."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from forge.settings._backends import backend_class, shipped_names
from forge.settings._settings import flat_fields, groups

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def recipe_schema(verb: str, settings_class: type, texts: Callable[[type], Mapping[str, str]]) -> dict[str, Any]:
    """Describe every setting of a verb: its type, choices, default and explanation.

    Args:
        verb: the verb.
        settings_class: its settings.
        texts: settings class of a group → field → its explanation.

    """
    owners = groups(settings_class)
    described = [(texts(owners[group])[field.name], field) for group, field in flat_fields(settings_class)]
    for backend in shipped_names():
        own = backend_class(backend).Settings
        fields = () if own is None else attrs.fields(attrs.resolve_types(own))
        described += [(f"With backend={backend}: {texts(own)[field.name]}", field) for field in fields]
    properties = {
        field.name: {
            "description": text,
            **_type(field.type, nullable=field.default is attrs.NOTHING),
            **({} if field.default in (attrs.NOTHING, None) else {"default": _as_json(field.default)}),
        }
        for text, field in described
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Recipe of forge {verb}",
        "type": "object",
        "additionalProperties": False,
        "properties": {"verb": {"const": verb, "description": "Training verb that the recipe is for."}, **properties},
    }


def _type(kind: Any, *, nullable: bool = False) -> dict[str, Any]:
    """Describe a type; what a recipe may leave open may be null in it."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    found = [each for part in kinds for each in _of_one(part)]
    if nullable and {"type": "null"} not in found:
        found.append({"type": "null"})
    return found[0] if len(found) == 1 else {"anyOf": found}


def _of_one(kind: Any) -> list[dict[str, Any]]:
    """Return the forms that YAML has for a value of one type."""
    if kind is type(None):
        return [{"type": "null"}]
    if kind is Any:
        return [{}]
    if get_origin(kind) is Literal:
        words = list(get_args(kind))
        # YAML 1.1 reads a bare on and off as true and false; here the word is meant.
        return [{"enum": [*words, *(flag for flag, word in ((True, "on"), (False, "off")) if word in words)]}]
    if get_origin(kind) is tuple:
        # A list of one may be written without brackets.
        part = _type(get_args(kind)[0])
        return [{"type": "array", "items": part}, part]
    if get_origin(kind) is Mapping:
        return [{"type": "object", "additionalProperties": _type(get_args(kind)[1])}]
    if kind is float:
        # YAML 1.1 reads 1e-5 as a string; here the number is meant.
        return [{"type": "number"}, {"type": "string", "pattern": r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"}]
    return [{"type": _PLAIN[kind]}]


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
