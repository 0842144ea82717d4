"""Bytes of tokens → character offsets, without the tokenizer's offset mapping.

A token of a byte-level vocabulary spells its bytes. Where the tokens of a text, one after the other, spell exactly that text,
their places are running sums of their lengths, for all texts at once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class TokenBytes:
    """The bytes of tokens of one byte-level vocabulary."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer: Any = tokenizer
        added = {number: token.content.encode() for number, token in tokenizer.added_tokens_decoder.items() if token.content}
        self._added = added
        # By id, for added tokens and those that occurred: their bytes, and how many.
        self._bytes: list[bytes] = []
        self._sizes = np.zeros(0, dtype=np.int64)
        self._learn(np.array(list(added), dtype=np.int32))

    def spell(self, texts: Sequence[str], ids: "NDArray[np.int32]", sizes: Sequence[int]) -> bool:
        """Tell whether the tokens of each text spell exactly that text, and keep their bytes.

        Args:
            texts: several texts.
            ids: int32[T], their tokens, text after text.
            sizes: tokens of each text.
        """
        if not texts:
            return True
        if not self._learn(ids):
            return False
        spelled = b"".join(map(self._bytes.__getitem__, ids.tolist()))
        lengths = [len(text) if text.isascii() else len(text.encode()) for text in texts]
        ends = np.append(0, np.cumsum(self._sizes[ids]))[np.cumsum(sizes)]
        return spelled == "".join(texts).encode() and np.array_equal(ends, np.cumsum(lengths))

    def offsets(self, texts: Sequence[str], ids: "NDArray[np.int32]", sizes: Sequence[int]) -> "NDArray[np.int64]":
        """Compute int64[T, 2], the characters of each token, for texts that their tokens spell."""
        ends = np.cumsum(self._sizes[ids], dtype=np.int64)
        begins = ends - self._sizes[ids]
        whole = "".join(texts)
        if not whole.isascii():
            # A token that begins or ends within a character stands for all of it, as in the tokenizer's own offsets.
            characters = np.cumsum(np.frombuffer(whole.encode(), dtype=np.int8) >= -64, dtype=np.int64)
            begins, ends = characters[begins] - 1, characters[ends - 1]
        lengths = [*map(len, texts)]
        firsts = np.cumsum(lengths, dtype=np.int64) - lengths
        return np.stack([begins, ends], axis=1) - np.repeat(firsts, sizes)[:, None]

    def _learn(self, ids: "NDArray[np.int32]") -> bool:
        """Look up the bytes of tokens that did not occur before; False if one spells none."""
        if not len(ids):
            return True
        more = int(ids.max()) + 1 - len(self._bytes)
        if more > 0:
            self._bytes += [b""] * more
            self._sizes = np.append(self._sizes, np.zeros(more, dtype=np.int64))
        occurs = np.zeros(len(self._bytes), dtype=np.bool_)
        occurs[ids] = True
        new: list[int] = np.flatnonzero(occurs & (self._sizes == 0)).tolist()
        for number, token in zip(new, self._tokenizer.convert_ids_to_tokens(new), strict=True):
            data = self._added.get(number) or token_bytes(token)
            if not data:
                return False
            self._bytes[number] = data
            self._sizes[number] = len(data)
        return True


def _byte_letters() -> dict[int, int]:
    """Map letters of byte-level vocabularies (GPT-2) to bytes.

    Printable Latin-1 is itself; U+0100 and on are the other bytes.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return {0x100 + place: byte for place, byte in enumerate(byte for byte in range(256) if byte not in plain)}


_LETTERS = _byte_letters()


def token_bytes(token: str | None) -> bytes:
    """Return the bytes of a token; none if it is spelled in other letters."""
    try:
        return (token or "").translate(_LETTERS).encode("latin-1")
    except UnicodeEncodeError:
        return b""
