"""Text with media as a processor writes it, and what stands for each in it."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Replacement(NamedTuple):
    """What stands for one medium in a text, in characters."""

    start: int
    """Where the template's placeholder begins."""
    stop: int
    text: str
    """What the processor writes in its place."""


class Expanded(NamedTuple):
    """A text with media, as a processor writes it."""

    replacements: list[Replacement]
    """One for each medium, in order."""
    ids: "NDArray[np.int32]"
    """int32[S], its tokens."""


class Recorder:
    """A tokenizer that remembers the last text that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.written = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        self.written = text if isinstance(text, str) else str(text[-1])
        return self._tokenizer(text, *args, **options)
