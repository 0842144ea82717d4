"""`Media`: an image or an audio clip of a row, by its file or its bytes."""

from typing import Literal

import attrs

Kind = Literal["image", "audio"]
"""Of which kind a medium is; the type of its part in a content, too."""
COLUMNS: dict[str, Kind] = {"images": "image", "image": "image", "audios": "audio", "audio": "audio"}
"""Columns of a row with the media of its messages, several of a kind or one."""
MARKS: dict[Kind, str] = {"image": "<image>", "audio": "<audio>"}
"""What stands for a medium in a text, in rows for LLaVA and LLaMA-Factory."""
ONE: dict[Kind, str] = {"image": "an image", "audio": "an audio clip"}
MANY: dict[Kind, str] = {"image": "images", "audio": "audio clips"}
"""Kind → what messages call one, and several."""


@attrs.frozen
class Media:
    """One image or audio clip of a conversation: the file or the bytes that the row gives.

    Of `path` and `data` one is None. What a processor makes of it is no part of a store: it is made again from the same bytes,
    which `sha256` names, whenever the sample is trained on.
    """

    field: str
    """Field of the row that gives it, such as `messages[0].content[1]` or `images[0]`."""
    path: str | None = None
    """Absolute path of its file."""
    data: bytes | None = attrs.field(default=None, repr=False)
    """Its encoded bytes (PNG, JPEG, WAV, FLAC, ...), where the row holds them."""
    sha256: str = ""
    """Of the encoded bytes, in hex; empty until the row is encoded."""
    start: int = 0
    """First token that stands for it in the example."""
    stop: int = 0
    """Token after the last one that stands for it."""
    kind: Kind = "image"
