"""JSON object of a run ↔ its text with a SHA-256 of itself: no bit of it changes unnoticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SEAL = "sha256"


def sealed(values: Mapping[str, Any]) -> str:
    """Return the values as JSON text that holds its own SHA-256."""
    plain = json.loads(json.dumps(dict(values)))
    return json.dumps({**plain, _SEAL: _digest(plain)}, indent=2) + "\n"


def unsealed(file: Path) -> tuple[dict[str, Any], bool]:
    """Read what `sealed` wrote; return the values, and whether they were sealed.

    Those of an earlier version were not.

    Raises:
        ValueError: it is not whole; the message says what is wrong, and begins with no name.
        OSError: it cannot be read.

    """
    text = file.read_bytes()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({' '.join(str(error).split())})") from None
    if not isinstance(found, dict):
        raise ValueError("is not what a run writes")  # noqa: TRY004 - a file's content, and no argument
    seal = found.pop(_SEAL, None)
    if seal is not None and seal != _digest(found):
        raise ValueError("does not have the SHA-256 that it says it has: it was edited or damaged")
    return found, seal is not None


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
