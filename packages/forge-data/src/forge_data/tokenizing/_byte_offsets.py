"""Texts to ids and to the characters that each stands for, without asking the tokenizer where its tokens stand.

A token of a byte-level vocabulary spells its bytes. Where the tokens of a text, one after the other, spell exactly that text, there
is one place for each, and arithmetic over all texts at once finds it; a tokenizer that tells places spends a good part of its time
on them, and Python as much to take them in. Where they spell anything else (a normalizer changed the text, a special token
swallowed blanks), the tokenizer is asked.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data.tokenizing._word_cache import Words, words_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

Tokenised = tuple["NDArray[np.int32]", "NDArray[np.int64]", list[int]]
"""Ids int32[T] and offsets int64[T, 2] of several texts, one after the other, and how many tokens each has."""

_ON_THE_WAY = ("__call__", "_call_one", "_encode_plus", "_batch_encode_plus", "batch_encode_plus")
"""Methods between a tokenizer and its backend: one that is the user's own may do anything."""


class TokenBytes:
    """The bytes of tokens, for one tokenizer with a byte-level vocabulary."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", told: Callable[[list[str]], Tokenised]) -> None:
        self._tokenizer: Any = tokenizer
        self._told = told
        self._added = {number: token.content.encode() for number, token in tokenizer.added_tokens_decoder.items()}
        # By id, as far as they were met: the bytes, and how many.
        self._bytes: list[bytes] = []
        self._sizes = np.zeros(0, dtype=np.int64)
        self._works = _is_plain(tokenizer)
        self._spelled = True

    @cached_property
    def _words(self) -> Words | None:
        return words_of(self._tokenizer) if self._works else None

    @property
    def by_words(self) -> bool:
        """Whether texts are told word by word, which is work of Python's and not of the tokenizer's."""
        return self._works and self._words is not None

    def of(self, texts: list[str]) -> Tokenised:
        """What the tokenizer gives for some texts, without special tokens around them."""
        if not self._works or len(texts) < 2:
            return self._told(texts)
        # The first one by the tokenizer itself, which sets up its backend for all others: no truncation, no padding.
        first, places, (size,) = self._told(texts[:1])
        ids, sizes, spelled = self._by_words(self._words, texts) if self._words is not None else self._by_backend(texts)
        if sizes[0] != size or not np.array_equal(ids[:size], first) or not self._learn(ids):
            self._works = False
            return self._told(texts)
        offsets, unspelled = (self._laid(texts, ids, sizes), []) if spelled else self._places(texts, ids, sizes)
        if 2 * len(unspelled) > len(texts):
            self._works = False
        if unspelled:
            again, places, _ = self._told([texts[number] for number in unspelled])
            bounds = np.cumsum([0, *sizes]).tolist()
            at = np.concatenate([np.arange(bounds[number], bounds[number + 1]) for number in unspelled])
            if not np.array_equal(ids[at], again):
                self._works = False
                return self._told(texts)
            offsets[at] = places
        return ids, offsets, sizes

    def _by_backend(self, texts: list[str]) -> tuple["NDArray[np.int32]", list[int], bool]:
        """Ids int32[T] and how many of each text; and false, for whether they spell the texts is still to be seen."""
        encoded = self._tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        listed = [each.ids for each in encoded]
        del encoded
        return np.array(list(chain.from_iterable(listed)), dtype=np.int32), [len(ids) for ids in listed], False

    def _by_words(self, words: Words, texts: list[str]) -> tuple["NDArray[np.int32]", list[int], bool]:
        """The same from the pieces of the texts; whether the tokens of all pieces so far spell them."""
        told, new = words.of(texts)
        if self._spelled and new.texts:
            self._spelled = self._learn(new.ids) and not self._places(new.texts, new.ids, new.sizes)[1]
        if not words.repeats:
            self._words = None
        return told.ids, told.sizes, self._spelled

    def _learn(self, ids: "NDArray[np.int32]") -> bool:
        """Look up the tokens among these that were not met before; false if one spells no bytes."""
        if not len(ids):
            return True
        more = int(ids.max()) + 1 - len(self._bytes)
        if more > 0:
            self._bytes += [b""] * more
            self._sizes = np.append(self._sizes, np.zeros(more, dtype=np.int64))
        met = np.zeros(len(self._bytes), dtype=np.bool_)
        met[ids] = True
        new: list[int] = np.flatnonzero(met & (self._sizes == 0)).tolist()
        for number, token in zip(new, self._tokenizer.convert_ids_to_tokens(new), strict=True):
            data = self._added.get(number) or _spelled(token)
            if not data:
                return False
            self._bytes[number] = data
            self._sizes[number] = len(data)
        return True

    def _places(
        self, texts: Sequence[str], ids: "NDArray[np.int32]", sizes: list[int]
    ) -> tuple["NDArray[np.int64]", list[int]]:
        """int64[T, 2]: the characters of each token; and the numbers of the texts that their tokens do not spell."""
        spelled = b"".join(map(self._bytes.__getitem__, ids.tolist()))
        reached = np.append(0, np.cumsum(self._sizes[ids]))[np.cumsum(sizes)]
        if spelled != "".join(texts).encode() or not np.array_equal(reached, np.cumsum(_byte_lengths(texts))):
            return self._one_by_one(texts, spelled, ids, sizes)
        return self._laid(texts, ids, sizes), []

    def _laid(self, texts: Sequence[str], ids: "NDArray[np.int32]", sizes: list[int]) -> "NDArray[np.int64]":
        """int64[T, 2]: the characters of each token of texts that their tokens spell."""
        ends = np.cumsum(self._sizes[ids], dtype=np.int64)
        begins = ends - self._sizes[ids]
        lengths = [*map(len, texts)]
        whole = "".join(texts)
        if not whole.isascii():
            # A token that begins or ends within a character stands for all of it, as tokenizers have it.
            characters = np.cumsum(np.frombuffer(whole.encode(), dtype=np.int8) >= -64, dtype=np.int64)
            begins, ends = characters[begins] - 1, characters[ends - 1]
        firsts = np.cumsum(lengths, dtype=np.int64) - lengths
        return np.stack([begins, ends], axis=1) - np.repeat(firsts, sizes)[:, None]

    def _one_by_one(
        self, texts: Sequence[str], spelled: bytes, ids: "NDArray[np.int32]", sizes: list[int]
    ) -> tuple["NDArray[np.int64]", list[int]]:
        """The same where the tokens of some text spell another one; its places are left open."""
        offsets = np.zeros((len(ids), 2), dtype=np.int64)
        ends = [0, *np.cumsum(self._sizes[ids]).tolist()]
        unspelled = []
        for number, (first, last) in enumerate(pairwise([0, *np.cumsum(sizes).tolist()])):
            if spelled[ends[first] : ends[last]] != texts[number].encode():
                unspelled.append(number)
            elif last > first:
                own = ids[first:last]
                offsets[first:last], _ = self._places([texts[number]], own, [last - first])
        return offsets, unspelled


def _is_plain(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a tokenizer hands its texts to its backend as transformers does, and that one writes bytes."""
    from transformers import PreTrainedTokenizerFast

    kind, own = type(tokenizer), vars(tokenizer)
    if any(
        name in own or getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name, None) for name in _ON_THE_WAY
    ):
        return False
    backend = tokenizer.backend_tokenizer
    return hasattr(backend, "encode_batch_fast") and "ByteLevel" in repr(backend.decoder)


def _byte_lengths(texts: Sequence[str]) -> list[int]:
    return [len(text) if text.isascii() else len(text.encode()) for text in texts]


def _letters() -> dict[int, int]:
    """Letter to byte of byte-level vocabularies: printable Latin-1 stands for itself, the rest for U+0100 and on (GPT-2's rule)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return {0x100 + place: byte for place, byte in enumerate(byte for byte in range(256) if byte not in plain)}


_LETTERS = _letters()


def _spelled(token: str | None) -> bytes:
    """The bytes of a token; none where it is spelled in other letters."""
    try:
        return (token or "").translate(_LETTERS).encode("latin-1")
    except UnicodeEncodeError:
        return b""
