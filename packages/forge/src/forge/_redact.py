"""Text → the same without paths of this machine, and without secrets in addresses."""

from __future__ import annotations

import re
from typing import Any

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WHOLE_PATH = re.compile(r"(?:~[\w.-]*|\.{1,2})[/\\]|/|\\\\|[A-Za-z]:[/\\]")
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]+)://(?:[^\s/?#,]*@)?([^\s?#,]*)(?:[?#]\S*)?")
_WHOLE_ADDRESS = re.compile(r"([A-Za-z][\w+.-]+)://(?:[^/?#]*@)?([^?#]*).*", re.DOTALL)
_PATH = re.compile(r"(?<![\w.~/\\-])(?:(?:~[\w.-]*|\.{0,2})/|[A-Za-z]:[/\\]|~[\w.-]*\\|\\\\|[\w.-]+/[\w.-]+/)[^\s,:]*")


def is_hub_form(value: str) -> bool:
    """Return whether a string has the form org/name."""
    return _HUB_NAME.fullmatch(value) is not None


def last_part(value: str) -> str:
    r"""Return the last part of a path; a Hub name as it is, an address without user and query.

    >>> last_part("/my models/the base/"), last_part(r"C:\Users\me\smol"), last_part("org/name")
    ('the base', 'smol', 'org/name')
    >>> last_part("https://me:secret@host/rows.jsonl?token=secret")
    'https://host/rows.jsonl'
    """
    if is_hub_form(value):
        return value
    if address := _WHOLE_ADDRESS.fullmatch(value):
        return _public(address)
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] or value


def _public(found: re.Match[str]) -> str:
    """Return an address without user and query; of a file its last part."""
    return found[2].rstrip("/").rpartition("/")[2] if found[1].lower() == "file" else f"{found[1]}://{found[2]}"


def redact(value: Any) -> Any:
    """Reduce every path of this machine in a value to its last part; Hub names (org/name) stay.

    >>> redact("/home/me/models/smol"), redact("org/name"), redact("recipe ../mine/a.yaml")
    ('smol', 'org/name', 'recipe a.yaml')
    """
    if isinstance(value, dict):
        return {redact(key): redact(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(held) for held in value]
    if not isinstance(value, str):
        return value
    if _WHOLE_PATH.match(value) and "\n" not in value:
        return last_part(value)
    parts, end = [], 0
    for found in _ADDRESS.finditer(value):
        parts += [_PATH.sub(lambda path: last_part(path[0]), value[end : found.start()]), _public(found)]
        end = found.end()
    return "".join([*parts, _PATH.sub(lambda path: last_part(path[0]), value[end:])])
