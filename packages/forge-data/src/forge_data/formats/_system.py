"""Field `system` of a row, beside the messages or the text that say it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from forge_data.formats._unread import is_empty


def leaves_out_system(fields: Mapping[str, Any]) -> bool:
    """Tell whether a row has a field `system` and does not begin with what that says.

    Its messages may, or its prompt of text; a field that is empty, a flag or a number says nothing.
    """
    system = fields.get("system")
    if isinstance(system, (bool, int, float, np.number)) or is_empty(system):
        return False
    said = _text_of(system)
    if said == "" or (isinstance(system, np.ndarray) and not system.size):
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
