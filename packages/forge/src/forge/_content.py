"""Content of a message, text or parts → its text, with the names of its media."""

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
    return "".join(_text(part) for part in content if isinstance(part, dict))


def media_places(content: Any) -> list[int]:
    """Return the character of a content's text before which each medium stands.

    >>> media_places([{"type": "image"}, {"type": "text", "text": "Is it "}, {"type": "image"}])
    [0, 6]
    """
    places, at = list[int](), 0
    for part in content if isinstance(content, list) else ():
        if part["type"] == "text":
            at += len(part["text"])
        else:
            places.append(at)
    return places


def _text(part: dict[str, Any]) -> str:
    """Return a part's text, or its file's name; of a medium that a row holds as bytes its kind."""
    for kind in ("image", "video", "audio"):
        if kind in part:
            return f"[{os.path.basename(part[kind]) if isinstance(part[kind], str) else kind}] "
    return str(part.get("text", ""))
