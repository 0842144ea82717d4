"""Texts to ids piece by piece, each distinct piece asked for once.

A tokenizer that is byte pairs tokenises each piece of a text (a word, roughly) for itself, and most pieces of a text were in the texts
before it. To look up what was told of them takes a fraction of the time of being told again, and less than taking it in.
"""

from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_data.tokenizing._pretokenizer import Cut, added_tokens, cutter

if TYPE_CHECKING:
    import re

    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_MOST_PIECES = 1 << 18
_MOST_CHARACTERS = 1 << 23
"""What is remembered of texts that repeat nothing; beyond it, all is forgotten."""
_TELLING = 10_000
"""Pieces of a batch from which on it shows whether texts repeat anything."""


class Told(NamedTuple):
    """Some texts or pieces, and their tokens one after the other."""

    texts: Sequence[str]
    ids: "NDArray[np.int32]"
    sizes: list[int]


class Words:
    """What one tokenizer told of the pieces of texts. Made by `words_of`."""

    def __init__(self, backend: Any, cut: Cut, added: "re.Pattern[str]", ids: dict[str, int]) -> None:
        from tokenizers import Tokenizer, pre_tokenizers

        self._backend = backend
        # One piece, which has only to be spelled in the letters of the vocabulary.
        self._alone: Any = Tokenizer(backend.model)
        self._alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._cut = cut
        self._split = added.split
        self._added = ids
        self.repeats = True
        """Whether at least two of three pieces of the last texts were met before; with less, to ask for whole texts is quicker."""
        self._forget()

    def _forget(self) -> None:
        self._numbers = _Numbers()
        self._characters = 0
        self._ids = np.fromiter(self._added.values(), dtype=np.int32, count=len(self._added))
        self._counts = np.ones(len(self._added), dtype=np.int64)
        self._firsts = np.arange(len(self._added), dtype=np.int64)
        for content in self._added:
            self._numbers[content]

    def of(self, texts: Sequence[str]) -> tuple[Told, Told]:
        """The tokens of some texts, without special tokens around them, and of the pieces that were met for the first time."""
        if len(self._numbers) > _MOST_PIECES or self._characters > _MOST_CHARACTERS:
            self._forget()
        pieces: list[str] = []
        reached = [0]
        for text in texts:
            for number, part in enumerate(self._split(text)):
                if number % 2:
                    pieces.append(part)
                elif part:
                    pieces += self._cut(part)
            reached.append(len(pieces))
        known = len(self._numbers)
        numbers = np.fromiter(map(self._numbers.__getitem__, pieces), dtype=np.int64, count=len(pieces))
        new = self._learn([*islice(self._numbers, known, None)])
        counts = self._counts[numbers]
        ends = np.append(0, np.cumsum(counts))
        ids = self._ids[np.repeat(self._firsts[numbers] - ends[:-1], counts) + np.arange(ends[-1])]
        self.repeats = len(pieces) < _TELLING or 3 * len(new.texts) < len(pieces)
        return Told(texts, ids, np.diff(ends[reached]).tolist()), new

    def _learn(self, pieces: list[str]) -> Told:
        """Ask what the tokens of pieces are that were not met before."""
        told: list[list[int]] = [[]] * len(pieces)
        ascii_only = [piece.isascii() for piece in pieces]
        for backend, kind in ((self._alone, True), (self._backend, False)):
            of_kind = [number for number, is_ascii in enumerate(ascii_only) if is_ascii == kind]
            encoded = backend.encode_batch_fast([pieces[number] for number in of_kind], add_special_tokens=False)
            for number, each in zip(of_kind, encoded, strict=True):
                told[number] = each.ids
        sizes = [len(ids) for ids in told]
        ids = np.fromiter(chain.from_iterable(told), dtype=np.int32, count=sum(sizes))
        counts = np.array(sizes, dtype=np.int64)
        self._firsts = np.append(self._firsts, len(self._ids) + np.cumsum(counts) - counts)
        self._counts = np.append(self._counts, counts)
        self._ids = np.append(self._ids, ids)
        self._characters += sum(map(len, pieces))
        return Told(pieces, ids, sizes)


class _Numbers(dict[str, int]):
    """Pieces in the order in which they were met, and the number of each."""

    def __missing__(self, piece: str) -> int:
        number = self[piece] = len(self)
        return number


def words_of(tokenizer: "PreTrainedTokenizerBase") -> Words | None:
    """For a tokenizer whose pieces are known beforehand; None for any other."""
    from tokenizers import models

    backend: Any = tokenizer.backend_tokenizer
    # An attribute of transformers' own: whether `<|im_end|>` in a text is that token or letters.
    if type(backend.model) is not models.BPE or backend.model.dropout or getattr(tokenizer, "split_special_tokens", False):
        return None
    cut, added = cutter(backend), added_tokens(backend)
    return None if cut is None or added is None else Words(backend, cut, *added)
