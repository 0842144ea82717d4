"""Words of a shell → values of settings that are mappings in Python and in recipes."""

import os
from collections.abc import Sequence

from forge_data._errors import DataError
from forge_data._paths import expand_user


def paths_of(words: Sequence[str]) -> str | list[str] | dict[str, float]:
    """Read the paths of a data set, each with `=WEIGHT` or none of them.

    A word that names something that exists is a path, whatever it contains; so is a URL with a query.

    >>> paths_of(["a.jsonl=0.7", "b.jsonl=0.3"]), paths_of(["a.jsonl", "b.jsonl"]), paths_of(["a.jsonl"])
    ({'a.jsonl': 0.7, 'b.jsonl': 0.3}, ['a.jsonl', 'b.jsonl'], 'a.jsonl')

    Raises:
        DataError: some have a weight and others have none, or one path has two.
    """
    weighted = [_weighted(word) for word in words]
    found = {path: weight for path, weight in weighted if weight is not None}
    if not found:
        return words[0] if len(words) == 1 else list(words)
    without = next((path for path, weight in weighted if weight is None), None)
    if without is not None:
        path, weight = next(iter(found.items()))
        raise DataError(f"{path} has the weight {weight:g}, and {without} has none; give every path a weight, or no path one")
    if len(found) < len(words):
        twice = next(path for at, (path, _) in enumerate(weighted) if path in dict(weighted[:at]))
        raise DataError(f"{twice} is named more than once, each time with a weight; name it once")
    return found


def _weighted(word: str) -> tuple[str, float | None]:
    path, equals, weight = word.rpartition("=")
    try:
        if not path or not equals or ("://" in word and "?" in word) or os.path.exists(expand_user(word, DataError)):
            return word, None
        return path, float(weight)
    except ValueError:
        return word, None


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
