"""Completions of a model → a teacher's tokens of the same text, and the common spans.

A completion stands in the place of a row's last answer. The teacher is asked in its own chat template, up to where its tokens
of that answer begin. Behind that stands what its template writes before an answer, the completion's text, and, if the
completion ended by itself, what ends an answer there.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forge_data._example import IGNORED
from forge_data.aligning._align import Sample, Side, common_spans, side_of
from forge_data.aligning._spelling import Spelling

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class TaughtAnswer(NamedTuple):
    """A teacher's tokens of a completion, behind its prompt, and the spans that both cut alike."""

    ids: "NDArray[np.int32]"
    """int32[U]."""
    spans: "NDArray[np.int32]"
    """int32[G, 4]: tokens [a, b) of the completion and [c, d) of `ids`, of the same text."""


class AnswerReader:
    """Reads a model's completions as a teacher with another tokenizer does.

    Args:
        tokenizer: of the model.
        teacher: the other one, with `prepare_taught` that of the rows.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase") -> None:
        self._own, self._other, self._teacher = Spelling(tokenizer), Spelling(teacher), teacher

    def __call__(
        self, sample: Sample, text: "NDArray[np.int32]", begin: int, completion: "NDArray[np.int32]", *, ended: bool
    ) -> TaughtAnswer:
        """Read a completion that was sampled in the place of a row's last answer.

        Args:
            sample: ids and labels of the row, int32[S] each.
            text: the teacher's tokens of the row, int32[U].
            begin: where in these its last answer begins.
            completion: int32[C], the token that ends it too.
            ended: whether the last of these ends it.
        """
        row, theirs = _last_run(sample), text[begin:]
        a, b = side_of(row, self._own), side_of(theirs, self._other)
        content = len(b.bounds) - 1
        whole = b"".join(self._other.of(theirs[:content]))
        # What one template alone writes before an answer (an empty block of reasoning) is not the other's to read.
        alone, their_own = _more(a, b), _more(b, a)
        special = [False] * (len(completion) - ended) + [True] * ended
        mine = side_of(completion, self._own, special)
        skipped = _tokens_of(mine, min(len(alone), len(mine.text)) if alone.startswith(mine.text[: len(alone)]) else 0)
        mine = side_of(completion[skipped:], self._own, special[skipped:])
        blanks = whole[: len(whole) - len(whole.lstrip(_BLANKS))]
        ids = self._continued(text[:begin], (blanks + their_own + mine.text).decode("utf-8", "replace"))
        special = [False] * len(ids)
        if ended and b.closing is not None:
            ids = np.append(ids, theirs[content : b.closing + 1])
            special += [False] * (b.closing - content) + [True]
        before = _tokens_of(side_of(ids, self._other, special), len(their_own))
        spans, _ = common_spans(mine, side_of(ids[before:], self._other, special[before:]))
        return TaughtAnswer(ids.astype(np.int32), (spans + np.repeat([skipped, before], 2)).astype(np.int32))

    def _continued(self, prompt: "NDArray[np.int32]", text: str) -> "NDArray[np.int32]":
        """Tokenise a text behind a prompt: both as one text, if the prompt's tokens stay."""
        for before in self._written(prompt):
            ids = self._encode(before + text)
            if np.array_equal(ids[: len(prompt)], prompt):
                return ids[len(prompt) :]
        return self._encode(text)

    def _written(self, prompt: "NDArray[np.int32]") -> Iterator[str]:
        """Yield the texts that tokens may be of; some tokenizers begin each part with a blank."""
        parts, added = self._other.of(prompt), self._teacher.added_tokens_decoder
        yield b"".join(parts).decode("utf-8", "replace")
        first = [at == 0 or int(prompt[at - 1]) in added for at in range(len(prompt))]
        yield b"".join(part.removeprefix(b" ") if begins else part for part, begins in zip(parts, first, strict=True)).decode(
            "utf-8", "replace"
        )

    def _encode(self, text: str) -> "NDArray[np.int32]":
        found = self._teacher(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return np.asarray(found["input_ids"], np.int32)


_BLANKS = b" \t\r\n"


def _tokens_of(side: Side, size: int) -> int:
    """Count the tokens that lie within the first bytes of a text; 0 for none of these."""
    return int((side.bounds[1:] <= size).sum()) if size else 0


def _more(side: Side, other: Side) -> bytes:
    """Return what one text has before the other, with which it ends; b"" if it does not."""
    longer = other.text and len(side.text) > len(other.text) and side.text.endswith(other.text)
    return side.text[: -len(other.text)] if longer else b""


def _last_run(sample: Sample) -> "NDArray[np.int32]":
    """Return the last tokens of a sample that are learned one after another."""
    ids, labels = sample
    learned = np.flatnonzero(np.asarray(labels) != IGNORED)
    breaks = np.flatnonzero(np.diff(learned) > 1)
    return ids[learned[breaks[-1] + 1 if len(breaks) else 0] : learned[-1] + 1]
