"""`Media`: an image of a row, by its file or its bytes."""

import attrs


@attrs.frozen
class Media:
    """One image of a conversation: the file or the bytes that the row gives.

    Of `path` and `data` one is None. What a processor makes of it is no part of a store: it is made again from the same bytes,
    which `sha256` names, whenever the sample is trained on.
    """

    field: str
    """Field of the row that gives it, such as `messages[0].content[1]` or `images[0]`."""
    path: str | None = None
    """Absolute path of its file."""
    data: bytes | None = attrs.field(default=None, repr=False)
    """Its encoded bytes (PNG, JPEG, ...), where the row holds them."""
    sha256: str = ""
    """Of the encoded bytes, in hex; empty until the row is encoded."""
    start: int = 0
    """First token that stands for it in the example."""
    stop: int = 0
    """Token after the last one that stands for it."""
