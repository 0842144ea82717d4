"""Words of a shell → values of settings that are mappings in Python and in recipes."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from forge_data._errors import DataError
from forge_data._paths import expand_user


def paths_of(words: Sequence[str]) -> str | list[Any] | dict[str, Any]:
    """Read the paths of data sets, with `=WEIGHT` or with `=` and settings in JSON.

    A word that names something that exists is a path, whatever it contains; so is a URL with a query. A path that is there
    twice is an entry of a list each time, which whoever reads it refuses unless each has other settings.

    >>> paths_of(["a.jsonl=0.7", "b.jsonl=0.3"]), paths_of(["a.jsonl", "b.jsonl"]), paths_of(["a.jsonl"])
    ({'a.jsonl': 0.7, 'b.jsonl': 0.3}, ['a.jsonl', 'b.jsonl'], 'a.jsonl')
    >>> paths_of(['a.jsonl={"data_format": "alpaca"}', "b.jsonl"])
    {'a.jsonl': {'data_format': 'alpaca'}, 'b.jsonl': {}}

    Raises:
        DataError: some have a weight and others have none, or what stands behind one is no JSON.
    """
    said = [_said(word) for word in words]
    found = {path: value for path, value in said if value is not None}
    if not found:
        return words[0] if len(words) == 1 else list(words)
    without = next((path for path, value in said if value is None), None)
    path, weight = next(iter(found.items()))
    if without is not None and isinstance(weight, float):
        raise DataError(f"{path} has the weight {weight:g}, and {without} has none; give every path a weight, or no path one")
    entries = [(path, {} if value is None else value) for path, value in said]
    if len(dict(entries)) == len(entries):
        return dict(entries)
    return [{"path": path, **(value if isinstance(value, Mapping) else {"weight": value})} for path, value in entries]


def _said(word: str) -> tuple[str, float | Mapping[str, Any] | None]:
    """Return a path and the weight or the mapping behind it, None where there is none."""
    path, equals, weight = word.rpartition("=")
    try:
        if not path or not equals or os.path.exists(expand_user(word, DataError)):
            return word, None
        settings = '={"' in word or (word.endswith("}") and "={" in word)
        path, _, own = word.partition("={") if settings else (path, "", None)
        if own is None:
            return (word, None) if "://" in word and "?" in word else (path, float(weight))
    except ValueError:
        return word, None
    return path, _mapping(path, f"{{{own}")


def _mapping(path: str, text: str) -> Mapping[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"behind {path} stands {text!r}, which is no JSON: {error}; write the settings of a data set as "
            '\'{"data_format": "alpaca"}\''
        ) from error


def columns_of(words: Sequence[str]) -> dict[str, str]:
    """Read columns and their new names, `question=prompt`.

    Raises:
        DataError: a word without `=`, or a column with two names.
    """
    found: dict[str, str] = {}
    for word in words:
        column, equals, name = word.rpartition("=")
        if not equals or not column or not name:
            raise DataError(f"`rename_columns` holds {word!r}; write COLUMN=NAME, such as question=prompt")
        if column in found:
            raise DataError(f"`rename_columns` gives the column {column!r} two names, {found[column]!r} and {name!r}; keep one")
        found[column] = name
    return found
