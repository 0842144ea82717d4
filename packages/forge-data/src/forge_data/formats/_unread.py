"""Fields of a row, a message, a part or a call that are not read → those that say something."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

# What data sets and APIs keep beside the text; no chat template reads it.
_METADATA = {
    "id", "annotations", "cache_control", "country", "created", "created_at", "finish_reason", "hashed_ip", "header", "index",
    "lang", "language", "message_id", "model", "model_name", "parent_id", "redacted", "score", "source", "state", "timestamp",
    "toxic", "turn_id", "turn_identifier",
}  # fmt: skip


def unread(values: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """List the fields that are not known and would be ignored although they say something.

    Those that are empty, or that are kept beside the text as metadata, are left out.
    """
    return sorted(name for name, item in values.items() if name not in known and name not in _METADATA and not is_empty(item))


def is_empty(value: object) -> bool:
    """Tell whether a value stands for none.

    A table fills every field of a struct, APIs write empty lists, and pandas writes NaN for null.
    """
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, np.ndarray):
        return not value.size
    if isinstance(value, dict):
        # Structs are not followed further down: they may be nested deeper than Python can follow.
        return all(not each if isinstance(each, dict) else is_empty(each) for each in value.values())
    return value is None or (isinstance(value, (str, bytes, list)) and not value)


def leaves_out_system(fields: Mapping[str, Any]) -> bool:
    """Tell whether a row has a field `system` and does not begin with what that says.

    Its messages may, or its prompt of text; a field that is empty, a flag or a number says nothing.
    """
    system = fields.get("system")
    if isinstance(system, (bool, int, float, np.number)) or is_empty(system):
        return False
    said = _text_of(system)
    if said == "":
        return False
    for name in ("messages", "prompt", "chosen"):
        value = fields.get(name)
        if isinstance(value, str) and said is not None and value.lstrip().startswith(said):
            return False
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
            content = first.get("content")
            if content == system or (said is not None and said == _text_of(content)):
                return False
    return True


def _text_of(content: object) -> str | None:
    """Return text, or that of one part of text, without white space around it."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text") if content[0].get("type") == "text" else None
    return content.strip() if isinstance(content, str) else None
