"""Text of an answer, piece by piece → what of it may be shown before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge._counted import counted


def end_of(text: str, stop: Sequence[str]) -> int:
    """Return where a text ends: before the first stop string in it.

    >>> end_of("1, 2, 3", ["3", ", 2"])
    1
    """
    return min((text.index(each) for each in stop if each in text), default=len(text))


def about_nothing(text: str, tokens: int, *, cut_off: bool, stopped: bool) -> str:
    """Say how an answer without a word came about.

    Args:
        text: of it, blanks included, without special tokens.
        tokens: that were drawn.
        cut_off: whether it might have gone on, but for the number of its tokens.
        stopped: whether there was a stop string.

    >>> about_nothing("", 1, cut_off=False, stopped=False)
    'ended its answer at once, without a word'
    """
    if stopped:
        return "wrote a stop text before any word"
    if not text and not cut_off and tokens < 2:
        return "ended its answer at once, without a word"
    wrote = "blanks alone" if text else "special tokens alone"
    return f"wrote {wrote}, and " + (f"was cut off at {counted(tokens, 'tokens')}" if cut_off else "ended its answer")


class BeforeStop:
    """Pieces of an answer, of which none is given that may become a stop string.

    >>> answer = BeforeStop(["END"])
    >>> [answer.add(piece) for piece in ("one E", "N", "o EN", "D two")], answer.rest()
    (['one ', '', 'ENo ', ''], '')
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._made, self._given = stop, "", 0

    @property
    def stopped(self) -> bool:
        """Whether there was a stop string."""
        return end_of(self._made, self._stop) < len(self._made)

    def add(self, piece: str) -> str:
        """Return what may be shown by now, and was not."""
        self._made += piece
        end = end_of(self._made, self._stop)
        if end == len(self._made):
            end -= max(
                (size for each in self._stop for size in range(1, len(each)) if self._made.endswith(each[:size])), default=0
            )
        return self._until(end)

    def rest(self) -> str:
        """Return what was held back, once the answer has ended."""
        return self._until(end_of(self._made, self._stop))

    def _until(self, end: int) -> str:
        shown = self._made[self._given : end]
        self._given = max(self._given, end)
        return shown


def until_stop(tokenizer: Any, stop: Sequence[str], prompt: int) -> Any:
    """Return a stopping criterion of transformers: the answer has a stop string.

    Its own `stop_strings` also end an answer whose beginning makes one with the end of the prompt.

    Args:
        tokenizer: of the model.
        stop: texts at which an answer ends.
        prompt: tokens before the answer.
    """
    import torch
    from transformers import StoppingCriteria

    class Stopped(StoppingCriteria):
        def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
            texts = tokenizer.batch_decode(input_ids[:, prompt:], skip_special_tokens=True)
            return torch.tensor([end_of(text, stop) < len(text) for text in texts], device=input_ids.device)

    return Stopped()
