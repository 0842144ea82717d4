"""Choice of a setting that a script added to a table from outside."""

from __future__ import annotations

from typing import Any, Literal, get_origin

import attrs


def is_added(field: attrs.Attribute[Any], value: object) -> bool:
    """Check for a further choice, which the field's own validator takes.

    It is a row that was added to a table.
    """
    if not isinstance(value, str) or get_origin(field.type) is not Literal or field.validator is None:
        return False
    try:
        field.validator(None, field, value)
    except (TypeError, ValueError):
        return False
    return True
