"""Text with paths and addresses of this machine → the same with only the part of them that a stranger may see."""

from __future__ import annotations

import re
from typing import Any

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WHOLE_PATH = re.compile(r"(?:~[\w.-]*|\.{1,2})[/\\]|/|\\\\|[A-Za-z]:[/\\]")
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]+)://(?:[^\s/?#,]*@)?([^\s?#,]*)(?:[?#]\S*)?")
_WHOLE_ADDRESS = re.compile(r"([A-Za-z][\w+.-]+)://(?:[^/?#]*@)?([^?#]*).*", re.DOTALL)
_PATH = re.compile(r"(?<![\w.~/\\-])(?:(?:~[\w.-]*|\.{0,2})/|[A-Za-z]:[/\\]|~[\w.-]*\\|\\\\|[\w.-]+/[\w.-]+/)[^\s,:]*")


def is_hub_form(value: str) -> bool:
    """Whether it has the form org/name."""
    return _HUB_NAME.fullmatch(value) is not None


def place_name(value: str) -> str:
    r"""The last part of a path, whatever it is made of; a name of the Hub stays, and an address without user and query.

    >>> place_name("/my models/the base/"), place_name(r"C:\Users\me\smol"), place_name("org/name")
    ('the base', 'smol', 'org/name')
    >>> place_name("https://me:secret@host/rows.jsonl?token=secret")
    'https://host/rows.jsonl'
    """
    if is_hub_form(value):
        return value
    if address := _WHOLE_ADDRESS.fullmatch(value):
        return _public(address)
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] or value


def _public(found: re.Match[str]) -> str:
    return found[2].rstrip("/").rpartition("/")[2] if found[1].lower() == "file" else f"{found[1]}://{found[2]}"


def nameless(value: Any) -> Any:
    """The same with every path on this machine reduced to its last part; names of the Hub (org/name) stay.

    >>> nameless("/home/me/models/smol"), nameless("org/name"), nameless("recipe ../mine/a.yaml")
    ('smol', 'org/name', 'recipe a.yaml')
    """
    if isinstance(value, dict):
        return {nameless(key): nameless(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [nameless(held) for held in value]
    if not isinstance(value, str):
        return value
    if _WHOLE_PATH.match(value) and "\n" not in value:
        return place_name(value)
    parts, end = [], 0
    for found in _ADDRESS.finditer(value):
        parts += [_PATH.sub(lambda path: place_name(path[0]), value[end : found.start()]), _public(found)]
        end = found.end()
    return "".join([*parts, _PATH.sub(lambda path: place_name(path[0]), value[end:])])
