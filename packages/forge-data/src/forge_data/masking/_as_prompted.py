"""Text and a learned turn in it → whether it stands there as it will be asked for."""

import os
import re
from typing import TYPE_CHECKING

from forge_data.chat_template._asked import Asked
from forge_data.formats._samples import Note
from forge_data.masking._loss_mask import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 1200
"""Characters of each text that are kept around their first difference, to be seen side by side."""


class TurnEnds:
    """The tokens of a vocabulary that may end turns."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        tokens = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        tokens.sort(key=len, reverse=True)
        self._token = re.compile("|".join(tokens) or r"(?!)")
        self._token_or_blank = re.compile("|".join([r"\s", *tokens]))
        # The end of a block within a turn, such as </tool_call>, ends no turn.
        self.eos = str(tokenizer.eos_token)
        eos = re.escape(self.eos)
        self._stop = re.compile("|".join(token for token in tokens if not token.startswith("</") or token == eos) or r"(?!)")

    def are_special(self, text: str) -> bool:
        """Tell whether a text is special tokens and blanks, which may end the last turn."""
        return bool(text.strip()) and not self._token_or_blank.sub("", text)

    def closes(self, text: str) -> bool:
        """Tell whether a text has a special token that may end any turn."""
        return self._stop.search(text) is not None

    def place(self, text: str) -> int:
        """Return where the last token that may end a turn begins; the end of a text without one."""
        return max((found.start() for found in self._stop.finditer(text)), default=len(text))

    def leading(self, text: str) -> tuple[str, int]:
        """Return the token that a text begins with, blanks aside, and where it ends; else ("", 0)."""
        found = self._token.match(text, len(text) - len(text.lstrip()))
        return (found[0], found.end()) if found and found[0] else ("", 0)

    def closing(self, text: str, span: Span) -> tuple[int, int] | None:
        """Return where the token is that ends a turn, the last behind its content; None without one.

        Of a span that a template marks, which says nothing of the content, it is one that only blanks follow.
        """
        marked = span.content_end == span.stop
        found = [each.span() for each in self._stop.finditer(text, span.start if marked else span.content_end, span.stop)]
        if not found or (marked and text[found[-1][1] : span.stop].strip()):
            return None
        return found[-1]

    def learned_end(self, text: str, span: Span) -> int:
        """Return the end of a span's learned part, in characters, as `trained_tokens` has it."""
        ends = [found.end() for found in self._token.finditer(text, span.content_end, span.stop)]
        return max(ends, default=span.closing_end)

    def extends(self, text: str, span: Span, asked: Asked, *, marked: bool) -> bool:
        """Tell whether a text has a turn as it is asked for, with all that is to be written.

        What a template marks (`marked`) is all of it, whatever follows.
        """
        end = self.learned_end(text, span)
        return self.follows(text[:end], asked, closed=marked or self.closes(text[span.content_end : end]))

    def follows(self, learned: str, asked: Asked, *, closed: bool) -> bool:
        """Tell whether a text up to a turn's end is its prompt and all that is to be written.

        After a turn that has an end of its own (`closed`), special tokens and blanks are the template's.
        """
        rest = asked.answered[len(learned) :]
        whole = not rest.strip() or (closed and self.are_special(rest))
        return whole and learned.startswith(asked.prompt) and asked.answered.startswith(learned)


def not_as_prompted(text: str, index: int, span: Span, asked: Asked, ends: TurnEnds) -> Note:
    """Note a learned turn that stands in a text in another form than the model is asked for it."""
    end = ends.learned_end(text, span)
    here, there = around_difference(text[:end], asked.answered)
    same = asked.follows and asked.answered[len(asked.prompt) :].startswith(text[span.start : end])
    learned = "the same text" if same else "another text"
    return Note(
        "not_as_prompted",
        f"messages[{index}]",
        f"{learned} is learned behind another context than the model is asked in: here {here!r}, asked {there!r}",
        warns=same,
        texts=around_difference(text[:end], asked.answered, size=_SHOWN),
    )


def around_difference(one: str, other: str, *, size: int = 96) -> tuple[str, str]:
    """Cut out of two texts where they begin to differ: a quarter before, the rest after."""
    at = len(os.path.commonprefix([one, other]))
    first, last = max(0, at - size // 4), at + 3 * size // 4
    return one[first:last], other[first:last]
