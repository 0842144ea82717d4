"""Content of a message, text or parts → its text, with the names of its images."""

from __future__ import annotations

import os
from typing import Any


def content_text(content: Any) -> str:
    """Return a content as text.

    >>> content_text([{"type": "image", "image": "/data/plum.png"}, {"type": "text", "text": "What is it?"}])
    '[plum.png] What is it?'
    """
    if not isinstance(content, list):
        return str(content)
    parts = [part for part in content if isinstance(part, dict)]
    return "".join(f"[{_name(part['image'])}] " if "image" in part else str(part.get("text", "")) for part in parts)


def _name(medium: Any) -> str:
    """Return the name of an image's file; of one that a row holds as bytes there is none."""
    return os.path.basename(medium) if isinstance(medium, str) else "image"
