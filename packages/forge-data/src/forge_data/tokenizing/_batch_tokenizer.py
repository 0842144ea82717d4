"""Batch of texts → ids and character offsets, from the word cache or the tokenizer.

The cache looks up the ids of words that occurred before, and places follow from the bytes that tokens stand for; a tokenizer
that reports offsets spends a good part of its time on them, and Python as much on reading them.
"""

from functools import cached_property
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_data.tokenizing._byte_offsets import TokenBytes
from forge_data.tokenizing._offsets import Offsets
from forge_data.tokenizing._word_cache import WordCache, word_cache

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_ENCODE_METHODS = ("__call__", "_call_one", "_encode_plus", "_batch_encode_plus", "batch_encode_plus")
"""Methods between a tokenizer and its backend: one that a subclass overrides may do anything."""
_MAX_MISSES = 8
"""Batches with a word that its tokens do not spell, after which the cache is not used any more."""


class Tokenised(NamedTuple):
    """Tokens of several texts, one text after the other."""

    ids: "NDArray[np.int32]"
    """int32[T]."""
    offsets: "NDArray[np.int64]"
    """int64[T, 2], the characters [a, b) of its text that each token stands for."""
    sizes: list[int]
    """Tokens of each text."""


NO_TOKENS = Tokenised(np.zeros(0, dtype=np.int32), np.zeros((0, 2), dtype=np.int64), [])


class BatchTokenizer:
    """Tokenises batches of texts with one tokenizer; two threads may call it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._offsets = Offsets(tokenizer)
        self.lock = Lock()
        """Held while the tokenizer is used."""
        self._direct = _calls_backend(tokenizer) and not getattr(tokenizer, "split_special_tokens", False)
        self._enabled = _is_plain(tokenizer)
        self._misses = 0

    @cached_property
    def _words(self) -> WordCache | None:
        return word_cache(self._tokenizer) if self._enabled else None

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    @property
    def uses_cache(self) -> bool:
        """Whether texts of conversations are tokenised from the word cache, which is Python's work."""
        return self._enabled and self._words is not None

    def __call__(self, texts: list[str], *, special: bool) -> Tokenised:
        """Tokenise texts; `special` adds the tokenizer's own special tokens around each."""
        if not texts:
            return NO_TOKENS
        with self.lock:
            if special or len(texts) < 2 or not self.uses_cache:
                return self._by_tokenizer(texts, special=special)
            return self._by_cache(texts)

    def one(self, text: str) -> Tokenised | None:
        """Tokenise one text, no special tokens added; None where its class does so in its own way."""
        backend: Any = self._tokenizer.backend_tokenizer
        # What transformers sets anew with each call.
        if not self._direct or backend.truncation is not None or backend.padding is not None or backend.encode_special_tokens:
            return None
        encoded = backend.encode(text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.int32)
        return Tokenised(ids, self._offsets.of(ids, [encoded.offsets]), [len(ids)])

    def _by_tokenizer(self, texts: list[str], *, special: bool) -> Tokenised:
        """Tokenise with the tokenizer's own offset mapping."""
        encoded = self._tokenizer(
            texts,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        sizes = [len(ids) for ids in encoded["input_ids"]]
        ids = np.fromiter(chain.from_iterable(encoded["input_ids"]), dtype=np.int32, count=sum(sizes))
        return Tokenised(ids, self._offsets.of(ids, encoded["offset_mapping"]), sizes)

    def _by_cache(self, texts: list[str]) -> Tokenised:
        """Tokenise from the word cache; the tokenizer itself checks the first text of every batch."""
        words = self._words
        assert words is not None
        # This call also sets the backend up for words that are new: no truncation, no padding.
        first = self._by_tokenizer(texts[:1], special=False)
        ids, sizes, new = words.encode(texts)
        if sizes[:1] != first.sizes or not np.array_equal(ids[: sizes[0]], first.ids):
            self._enabled = False
            return self._by_tokenizer(texts, special=False)
        if not self._bytes.spell(new.texts, new.ids, new.sizes):
            # A normalizer changed a text, or a special token took white space along: what was cached may not be what was
            # written.
            words.clear()
            self._misses += 1
            self._enabled = self._misses < _MAX_MISSES
            return self._by_tokenizer(texts, special=False)
        self._enabled = words.repeats
        return Tokenised(ids, self._bytes.offsets(texts, ids, sizes), sizes)


def _calls_backend(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Tell whether a tokenizer passes its texts to its backend as transformers does."""
    from transformers import PreTrainedTokenizerFast

    kind, own = type(tokenizer), vars(tokenizer)
    return not any(
        name in own or getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name, None) for name in _ENCODE_METHODS
    )


def _is_plain(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Tell whether a tokenizer passes its texts to a byte-level backend as transformers does."""
    backend: Any = tokenizer.backend_tokenizer
    return _calls_backend(tokenizer) and hasattr(backend, "encode_batch_fast") and "ByteLevel" in repr(backend.decoder)
