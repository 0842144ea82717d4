"""`Media`: an image, a video or an audio clip of a row, by its file, frames or bytes."""

from collections.abc import Iterable
from typing import Any, Literal, Self

import attrs

Kind = Literal["image", "video", "audio"]
"""Of which kind a medium is; the type of its part in a content, too."""
COLUMNS: dict[str, Kind] = {
    "images": "image",
    "image": "image",
    "videos": "video",
    "video": "video",
    "audios": "audio",
    "audio": "audio",
}
"""Columns of a row with the media of its messages, several of a kind or one."""
MARKS: dict[Kind, str] = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
"""What stands for a medium in a text, in rows for LLaVA and LLaMA-Factory."""
ONE: dict[Kind, str] = {"image": "an image", "video": "a video", "audio": "an audio clip"}
MANY: dict[Kind, str] = {"image": "images", "video": "videos", "audio": "audio clips"}
"""Kind → what messages call one, and several."""


def several(kinds: Iterable[Kind]) -> str:
    """Name kinds of media, such as "images" or "images, videos and audio clips"."""
    *others, last = [MANY[kind] for kind in kinds]
    return f"{', '.join(others)} and {last}" if others else last


@attrs.frozen
class Media:
    """One image, video or audio clip of a conversation: the file or bytes that the row gives.

    One of `path`, `data` and `frames` is given. What a processor makes of it is no part of a store: it is made again from the
    same bytes, which `sha256` names, whenever the sample is trained on.
    """

    field: str
    """Field of the row that gives it, such as `messages[0].content[1]` or `images[0]`."""
    path: str | None = None
    """Absolute path of its file."""
    data: bytes | None = attrs.field(default=None, repr=False)
    """Its encoded bytes (PNG, JPEG, WAV, FLAC, MP4, ...), where the row holds them."""
    sha256: str = ""
    """Of the encoded bytes, in hex; empty until the row is encoded. Of a list of frames that of theirs and of `fps`."""
    start: int = 0
    """First token that stands for it in the example."""
    stop: int = 0
    """Token after the last one that stands for it."""
    kind: Kind = "image"
    frames: tuple[Self, ...] = ()
    """Of a video that is a list of images, these, in order."""
    fps: float | None = None
    """Frames in a second of such a list, where the row says so."""

    @property
    def is_given(self) -> bool:
        """Whether it says which medium it is; otherwise the row gives one for it elsewhere."""
        return self.path is not None or self.data is not None or bool(self.frames)

    @property
    def given(self) -> str | bytes | list[Any]:
        """Return its path or its bytes, or those of its frames."""
        if self.frames:
            return [each.given for each in self.frames]
        found = self.path if self.data is None else self.data
        assert found is not None
        return found
