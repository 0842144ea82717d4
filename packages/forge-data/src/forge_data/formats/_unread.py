"""Fields of a message, a part or a call that are not read → those that say something."""

import math
from collections.abc import Collection, Mapping
from typing import Any

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
    return value is None or (isinstance(value, (str, list, dict)) and not value)
