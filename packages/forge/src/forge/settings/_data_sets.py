"""Values of `data_path` in any form → their paths, and what an entry has of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Data = str | list[Any] | tuple[Any, ...] | Mapping[str, Any]
"""A path, a list of paths and of mappings with a `path`, or a mapping of paths to what is said of each."""


def paths_in(data: Data | None) -> list[str]:
    """List the path of each entry.

    >>> paths_in(["a.jsonl", {"path": "b.jsonl", "weight": 2}]), paths_in({"a.jsonl": 0.5}), paths_in("a.jsonl")
    (['a.jsonl', 'b.jsonl'], ['a.jsonl'], ['a.jsonl'])
    """
    if isinstance(data, Mapping):
        return list(data)
    given = data if isinstance(data, (list, tuple)) else [] if data is None else [data]
    return [each["path"] if isinstance(each, Mapping) else each for each in given]


def with_paths(data: Any, change: Callable[[str], str]) -> Any:
    """Return the same data sets at other paths.

    >>> with_paths(["a.jsonl", {"path": "b.jsonl", "weight": 2}], str.upper)
    ['A.JSONL', {'path': 'B.JSONL', 'weight': 2}]
    """
    if isinstance(data, str):
        return change(data)
    if isinstance(data, Mapping):
        return {change(path): said for path, said in data.items()}
    found = [{**each, "path": change(each["path"])} if isinstance(each, Mapping) else change(each) for each in data]
    return found if isinstance(data, list) else tuple(found)


def said_of_each(data: Any) -> list[tuple[str, dict[str, Any]]]:
    """List the path of each entry with what is said of it, in whatever form.

    >>> said_of_each({"a.jsonl": 2, "b.jsonl": {}}) == said_of_each([{"path": "a.jsonl", "weight": 2}, "b.jsonl"])
    True
    """
    found = []
    for path, said in zip(paths_in(data), data.values() if isinstance(data, Mapping) else data, strict=True):
        own = {"weight": said} if isinstance(said, (int, float)) else said if isinstance(said, Mapping) else {}
        found.append((path, {name: value for name, value in own.items() if name != "path"}))
    return found


def own_of(data: Data, entry: int) -> Mapping[str, Any]:
    """Return what an entry of the data, by its number, has of its own."""
    said = list(data.values()) if isinstance(data, Mapping) else list(data) if isinstance(data, (list, tuple)) else []
    found = said[entry] if entry < len(said) else None
    return found if isinstance(found, Mapping) else {}
