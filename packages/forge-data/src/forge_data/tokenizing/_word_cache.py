"""Texts → ids, word by word; the tokenizer is asked once for each distinct word.

Byte-pair tokenizers tokenise each piece that they cut a text into (roughly a word) alone, and most words of a text occurred
before. Looking them up takes a fraction of the time of tokenising them again.
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

_MAX_WORDS = 1 << 18
_MAX_CHARACTERS = 1 << 23
"""Size of the cache; beyond it everything is forgotten, so that texts that repeat nothing do not fill the memory."""
_MIN_SAMPLE = 10_000
"""Words of a batch from which on it shows whether texts repeat words."""


class New(NamedTuple):
    """Words that occurred for the first time, and their tokens, one word after the other."""

    texts: Sequence[str]
    ids: "NDArray[np.int32]"
    """int32[T]."""
    sizes: list[int]
    """Tokens of each word."""


class WordCache:
    """The ids of the words that occurred, for one tokenizer. Made by `word_cache`."""

    def __init__(self, backend: Any, cut: Cut, added: "re.Pattern[str]", added_ids: dict[str, int]) -> None:
        from tokenizers import Tokenizer, pre_tokenizers

        self._backend = backend
        # Tokenises one ASCII word, which only has to be spelled in the letters of the vocabulary.
        self._word_backend: Any = Tokenizer(backend.model)
        self._word_backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._cut = cut
        self._split = added.split
        self._added = added_ids
        self.repeats = True
        """Whether at least two of three words of the last texts occurred before; with fewer, whole texts are quicker."""
        self.clear()

    def clear(self) -> None:
        """Forget every word."""
        self._numbers = _Numbers()
        self._characters = 0
        self._ids = np.fromiter(self._added.values(), dtype=np.int32, count=len(self._added))
        self._counts = np.ones(len(self._added), dtype=np.int64)
        self._firsts = np.arange(len(self._added), dtype=np.int64)
        for content in self._added:
            self._numbers[content]

    def encode(self, texts: Sequence[str]) -> tuple["NDArray[np.int32]", list[int], New]:
        """Tokenise texts without special tokens around them.

        Returns:
            The ids int32[T], the number of tokens of each text, and the words that are new.
        """
        if len(self._numbers) > _MAX_WORDS or self._characters > _MAX_CHARACTERS:
            self.clear()
        words: list[str] = []
        ends = [0]
        for text in texts:
            for number, part in enumerate(self._split(text)):
                if number % 2:
                    words.append(part)
                elif part:
                    words += self._cut(part)
            ends.append(len(words))
        known = len(self._numbers)
        numbers = np.fromiter(map(self._numbers.__getitem__, words), dtype=np.int64, count=len(words))
        new = self._learn([*islice(self._numbers, known, None)])
        counts = self._counts[numbers]
        tokens = np.append(0, np.cumsum(counts))
        ids = self._ids[np.repeat(self._firsts[numbers] - tokens[:-1], counts) + np.arange(tokens[-1])]
        self.repeats = len(words) < _MIN_SAMPLE or 3 * len(new.texts) < len(words)
        return ids, np.diff(tokens[ends]).tolist(), new

    def _learn(self, words: list[str]) -> New:
        """Tokenise words that did not occur before, and keep their ids."""
        listed: list[list[int]] = [[]] * len(words)
        ascii_only = [word.isascii() for word in words]
        for backend, kind in ((self._word_backend, True), (self._backend, False)):
            of_kind = [number for number, is_ascii in enumerate(ascii_only) if is_ascii == kind]
            encoded = backend.encode_batch_fast([words[number] for number in of_kind], add_special_tokens=False)
            for number, each in zip(of_kind, encoded, strict=True):
                listed[number] = each.ids
        sizes = [len(ids) for ids in listed]
        ids = np.fromiter(chain.from_iterable(listed), dtype=np.int32, count=sum(sizes))
        counts = np.array(sizes, dtype=np.int64)
        self._firsts = np.append(self._firsts, len(self._ids) + np.cumsum(counts) - counts)
        self._counts = np.append(self._counts, counts)
        self._ids = np.append(self._ids, ids)
        self._characters += sum(map(len, words))
        return New(words, ids, sizes)


class _Numbers(dict[str, int]):
    """Words in the order in which they occurred, with the number of each."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


def word_cache(tokenizer: "PreTrainedTokenizerBase") -> WordCache | None:
    """Make the cache of a BPE tokenizer that cuts words by a known expression; None for others."""
    from tokenizers import models

    backend: Any = tokenizer.backend_tokenizer
    # An attribute of transformers: whether `<|im_end|>` in a text is that token or letters.
    if type(backend.model) is not models.BPE or backend.model.dropout or getattr(tokenizer, "split_special_tokens", False):
        return None
    cut, added = cutter(backend), added_tokens(backend)
    return None if cut is None or added is None else WordCache(backend, cut, *added)
