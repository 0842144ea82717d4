"""Value as it was given, in Python or in text → the type of a setting's field."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any, Literal, Union, cast, get_args, get_origin

import attrs

from forge._errors import SettingsError
from forge.settings._added import is_added
from forge.settings._elsewhere import made_elsewhere, meant
from forge.settings._origin import origin_note


def converted(field: attrs.Attribute[Any], value: object, origin: str) -> object:
    """Convert a value to the field's type. Raises SettingsError with the type and the value."""
    kinds = get_args(field.type) if get_origin(field.type) in (Union, types.UnionType) else (field.type,)
    if value is None and (types.NoneType in kinds or field.default is attrs.NOTHING):
        return None
    tried = (_as_kind(kind, value, from_text=origin.startswith("recipe")) for kind in kinds)
    if (found := next((each for each in tried if each is not None), None)) is not None or is_added(field, value):
        return value if found is None else found
    reason = field.metadata.get("refused", {}).get(value) if isinstance(value, str) else None
    if reason is not None:
        raise SettingsError(f"{field.name}={value}{origin_note(origin)} is not available: {reason}. Leave {field.name} out.")
    wanted = " or ".join(_spelled(kind) for kind in kinds if kind is not types.NoneType)
    choices = tuple(each for kind in kinds for each in _choices(kind))
    close = ""
    if isinstance(value, str) and choices and not (close := made_elsewhere(value, choices) or ""):
        close = f"Did you mean {word!r}?" if (word := meant(field.name, value, choices)) else ""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    if any(hasattr(part, "save_pretrained") for part in parts):
        close = "Save it with save_pretrained, its tokenizer beside it, and give the directory."
    elif (function := next(filter(callable, parts), None)) is not None:
        close = f"Give a function by its name, {_name_of(function, field.name)}: config.yaml holds it."
    raise SettingsError(
        f"{field.name} must be {wanted}, not {_shown(value)}{origin_note(origin)}." + (f" {close}" if close else "")
    )


def _choices(kind: Any) -> tuple[Any, ...]:
    """Return the words of a type, or of a list's elements, that has no others."""
    of_one = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return get_args(of_one) if get_origin(of_one) is Literal else ()


def _shown(value: object) -> str:
    """Return a value as an error message shows it, in one line: of an object its type."""
    if value is None or isinstance(value, (str, int, float, PathLike)):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_shown(name)}: {_shown(part)}' for name, part in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if name := getattr(value, "__qualname__", ""):
        return f"the {'class' if isinstance(value, type) else 'function'} {name}"
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"


def _name_of(function: object, setting: str) -> str:
    """Say how a function is named in a setting."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<>")
    if not module or "<" in name:
        return '"module:function", from a file that can be imported'
    if module == "__main__" and setting == "preprocess":
        return f'"module:{name}", from a file that processes which read rows can import'
    if module == "__main__":
        return f'"__main__:{name}" in a run of one process, or "module:{name}" from a file that can be imported'
    return f'"{module}:{name}"'


def _as_kind(kind: Any, value: object, *, from_text: bool) -> object | None:
    """Convert a value to one type; None where it is not of that type.

    `from_text` converts what YAML 1.1 reads as another type.
    """
    if get_origin(kind) in (Union, types.UnionType):
        tried = (_as_kind(each, value, from_text=from_text) for each in get_args(kind))
        return next((each for each in tried if each is not None), None)
    if get_origin(kind) is Literal:
        if from_text and isinstance(value, bool):
            # YAML 1.1 reads a bare on or off as true or false; here the word is meant.
            value = "on" if value else "off"
        if value == float("inf") and not isinstance(value, bool):
            # As YAML's .inf and Python's math.inf come.
            value = "inf"
        return value if isinstance(value, str) and value in get_args(kind) else None
    if get_origin(kind) is tuple:
        parts = (value,) if isinstance(value, str) else value
        if isinstance(parts, float | int) and not isinstance(parts, bool):
            parts = (parts,)
        if not isinstance(parts, Sequence):
            return None
        found = tuple(_as_kind(get_args(kind)[0], part, from_text=from_text) for part in parts)
        return None if None in found else found
    if get_origin(kind) is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(name, (str, PathLike)) for name in value):
            return None
        # The values are checked by the settings class that owns the field.
        return {fspath(name): fspath(share) if isinstance(share, PathLike) else share for name, share in value.items()}
    if kind is str:
        return fspath(cast("str | PathLike[str]", value)) if isinstance(value, (str, PathLike)) else None
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind in (int, float) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-5 as a string; here the number is meant.
        if from_text and isinstance(value, str):
            try:
                return kind(value)
            except ValueError:
                return None
        if isinstance(value, int) or (kind is float and isinstance(value, float)):
            # An int beyond every float becomes infinity, which the fields refuse.
            return float("inf") if kind is float and isinstance(value, int) and abs(value) >= 2**1000 else kind(value)
    return None


def _spelled(kind: Any) -> str:
    """Return a type in words, for an error message."""
    if get_origin(kind) is Literal:
        choices = [repr(choice) for choice in get_args(kind)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if get_origin(inner) is Literal:
            return f"one or several of {', '.join(map(repr, get_args(inner)))}"
        if get_origin(inner) in (Union, types.UnionType):
            return f"a list of {' or '.join(_spelled(each).split()[1] + 's' for each in get_args(inner))}"
        return f"a list of {_spelled(inner).removeprefix('a ')}s"
    if get_origin(kind) is Mapping:
        of = get_args(kind)[1]
        inner = get_args(of) if get_origin(of) in (Union, types.UnionType) else (of,)
        names = ["mappings" if get_origin(each) is Mapping else f"{_spelled(each).removeprefix('a ')}s" for each in inner]
        return f"a mapping from strings to {' or '.join(names)}"
    return {str: "a string", int: "a whole number", float: "a number", bool: "true or false", Any: "a value"}[kind]
