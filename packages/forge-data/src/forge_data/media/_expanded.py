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


class PlainText(NamedTuple):
    """A prompt and a completion of plain text, as a processor writes and tokenizes them."""

    prompt: str
    completion: str
    apart: bool
    """Whether the two are tokenized apart, and nothing is added to either."""
    spans: list[tuple[int, int]]
    """Characters of the prompt that stand for each medium."""
    ids: "NDArray[np.int32]"
    """int32[S], the tokens of both."""


class Recorder:
    """A tokenizer that remembers the last text that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.written = ""
        self.pair = ""
        """The text that was given to be tokenized apart, behind it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        self.written = text if isinstance(text, str) else str(text[-1])
        pair = options.get("text_pair") or [""]
        self.pair = pair if isinstance(pair, str) else str(pair[-1])
        return self._tokenizer(text, *args, **options)
