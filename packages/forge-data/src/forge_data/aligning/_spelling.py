"""Tokens of a vocabulary → the bytes that each spells; tokens that two vocabularies share.

A byte-level vocabulary (GPT-2's) writes bytes in letters of its own; one of SentencePiece writes a space as "▁" and a byte that
is no character as "<0x0A>". Any other is taken as it stands.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data.tokenizing._byte_offsets import token_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


class Spelling:
    """The bytes of the tokens of one vocabulary, as they stand within a text.

    Args:
        tokenizer: a fast one, of the ids.

    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer: Any = tokenizer
        added = tokenizer.added_tokens_decoder
        self._added = {number: token.content.encode() for number, token in added.items()}
        self._known: dict[int, bytes] = {}
        self.special = frozenset(number for number, token in added.items() if token.special)
        """Ids of special tokens, one of which may end a turn."""

    def of(self, ids: "Iterable[int] | NDArray[Any]") -> list[bytes]:
        """Return the bytes of tokens; b"" of one that spells none, as an id without a token."""
        numbers = np.asarray(ids).tolist()
        known = self._known
        new = list({number for number in numbers if number not in known})
        for number, token in zip(new, self._tokenizer.convert_ids_to_tokens(new), strict=True):
            found = self._added.get(number)
            known[number] = self._bytes(token) if found is None else found
        return [known[number] for number in numbers]

    @cached_property
    def _kinds(self) -> frozenset[str]:
        """Types of the parts of the tokenizer that tell how it writes bytes."""
        whole = json.loads(self._tokenizer.backend_tokenizer.to_str())
        found = set(_types(whole.get("decoder"))) | set(_types(whole.get("pre_tokenizer")))
        written = json.dumps([whole.get(part) for part in ("decoder", "pre_tokenizer", "normalizer")], ensure_ascii=False)
        return frozenset(found | ({_SPACE} if _SPACE in written else set()))

    def _bytes(self, token: str | None) -> bytes:
        if token is None:
            return b""
        if "ByteLevel" in self._kinds:
            return token_bytes(token)
        if _SPACE in self._kinds:
            if "ByteFallback" in self._kinds and (byte := _BYTE.fullmatch(token)):
                return bytes([int(byte[1], 16)])
            token = token.replace(_SPACE, " ")
        return token.encode("utf-8", "ignore")


def _types(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from ([part["type"]] if isinstance(part.get("type"), str) else [])
        for value in part.values():
            yield from _types(value)
    elif isinstance(part, list):
        for value in part:
            yield from _types(value)


def shared_tokens(
    tokenizer: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase", ends: Iterable[tuple[int, int]] = ()
) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
    """Find the tokens of two vocabularies that spell the same bytes: int64[n] twice.

    Added tokens are compared with added ones, and others with others. Of several that spell the same, those of the lowest ids
    are taken for each other, and a byte of SentencePiece's (`<0x20>`) last.

    Args:
        tokenizer: of the ids that come first.
        teacher: the other one.
        ends: pairs of tokens that do the same whatever they spell, those that end a turn, as `store.teacher_ends` has them.
    """
    ours, theirs = (_by_bytes(each) for each in (tokenizer, teacher))
    pairs = {ours[text]: theirs[text] for text in ours if text in theirs}
    taken = set(pairs.values())
    for own, other in ends:
        if own not in pairs and other not in taken:
            pairs[own] = other
            taken.add(other)
    found = np.array(sorted(pairs.items()), dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _by_bytes(tokenizer: "PreTrainedTokenizerBase") -> dict[tuple[bytes, bool], int]:
    spelling, added = Spelling(tokenizer), tokenizer.added_tokens_decoder
    # Those that are taken come last; "<0x20>" is read, but never written.
    vocabulary: Any = tokenizer.get_vocab()
    ids = [number for _, number in sorted((bool(_BYTE.fullmatch(token)), at) for token, at in vocabulary.items())][::-1]
    found = {(text, number in added): number for number, text in zip(ids, spelling.of(ids), strict=True)}
    return {text: number for text, number in found.items() if text[0]}
