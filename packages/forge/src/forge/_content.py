"""Content of a message, text or parts → its text, with the names of its images and clips."""

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
    media = [next((part[kind] for kind in ("image", "audio") if kind in part), None) for part in parts]
    return "".join(
        str(part.get("text", "")) if medium is None else f"[{os.path.basename(str(medium))}] "
        for part, medium in zip(parts, media, strict=True)
    )
