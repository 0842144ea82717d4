"""Token ids → text of each token, without tokenising: its bytes, and whether it is special.

A tokenizer's `decode` joins tokens first, so it cannot give the text of one token alone. The vocabulary can, once it is known
how its tokens are spelled; the tokenizer's own decoder describes that.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Spelling of a byte in a SentencePiece vocabulary."""
_OPEN_ENDED = "surrogateescape"
"""Bytes that are not UTF-8 become U+DC80 to U+DCFF, which no text can contain."""


@attrs.frozen(slots=True)
class Piece:
    """One token."""

    data: bytes
    """Bytes that it adds to the text; any part of a character's UTF-8."""
    special: bool = False
    """Whether it stands for itself in the vocabulary, such as <|im_end|>: shown as one thing, never as letters."""

    @property
    def text(self) -> str:
        """Its bytes as text, on their own; bytes that are not UTF-8 as U+DC80 to U+DCFF."""
        return self.data.decode("utf-8", _OPEN_ENDED)


class TokenTexts:
    """Texts of one vocabulary's tokens; without a tokenizer, each id is a number in brackets."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Piece] = {}
        self._steps: list[dict[str, Any]] = []
        self._bytes: dict[str, int] | None = None
        self._added: dict[int, Any] = {}
        if tokenizer is not None:
            self._added = tokenizer.added_tokens_decoder
            self._steps = _decoder_steps(tokenizer)
            if any(step["type"] == "ByteLevel" for step in self._steps):
                self._bytes = _byte_alphabet()
        # Whole words with a blank between them that belongs to no token: WordPiece, or a vocabulary without a decoder.
        self._spaced = tokenizer is not None and (not self._steps or any(s["type"] == "WordPiece" for s in self._steps))

    def of(self, ids: Sequence[int]) -> list[Piece]:
        """Return one piece for each token, in order."""
        known = self._known
        for number in set(ids) - known.keys():
            known[number] = self._piece(number)
        pieces = [known[number] for number in ids]
        if self._spaced:
            prefix = next((step["prefix"] for step in self._steps if step["type"] == "WordPiece"), "")
            pieces[1:] = [self._after_blank(number, prefix) for number in ids[1:]]
        return pieces

    def _piece(self, number: int) -> Piece:
        if self._tokenizer is None:
            return Piece(f"[{number}]".encode(), special=True)
        added = self._added.get(number)
        if added is not None:
            # Runs of blanks are added tokens in some vocabularies; they are shown as text.
            return Piece(added.content.encode(), special=not added.content.isspace())
        token = self._tokenizer.convert_ids_to_tokens(number)
        if not isinstance(token, str):
            return Piece(f"[{number}]".encode(), special=True)
        if self._bytes is not None:
            return Piece(b"".join(self._letter(letter) for letter in token))
        byte = _BYTE.fullmatch(token) if any(step["type"] == "ByteFallback" for step in self._steps) else None
        return Piece(bytes([int(byte[1], 16)]) if byte else self._spelled(token).encode("utf-8", "surrogatepass"))

    def _letter(self, letter: str) -> bytes:
        assert self._bytes is not None
        byte = self._bytes.get(letter)
        return letter.encode() if byte is None else bytes([byte])

    def _spelled(self, token: str) -> str:
        for step in self._steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": new}:
                    token = token.replace(old, new)
                case {"type": "Metaspace", "replacement": old}:
                    token = token.replace(old, " ")
                case {"type": "BPEDecoder", "suffix": suffix}:
                    token = token.removesuffix(suffix) + " " if token.endswith(suffix) else token
        return token

    def _after_blank(self, number: int, prefix: str) -> Piece:
        piece = self._known[number]
        if piece.special:
            return piece
        follows = prefix and piece.data.startswith(prefix.encode())
        return Piece(piece.data[len(prefix.encode()) :] if follows else b" " + piece.data)


def characters(pieces: Sequence[Piece]) -> tuple[list[str], list[bool]]:
    """Return the text of each token, and whether it begins inside a character of an earlier one.

    A character whose bytes are spread over several tokens is in the first of them. Bytes that never become a character stay
    where they are, as U+DC80 to U+DCFF.
    """
    texts, inside = [""] * len(pieces), [False] * len(pieces)
    decoder = codecs.getincrementaldecoder("utf-8")(_OPEN_ENDED)
    waiting: list[int] = []
    """The token of each byte of the character that is still open."""

    def close(out: str) -> str:
        if not waiting or not out:
            return out
        if "\udc80" <= out[0] <= "\udcff":
            for owner, byte in zip(waiting, out, strict=False):
                texts[owner] += byte
            return out[len(waiting) :]
        texts[waiting[0]] += out[0]
        return out[1:]

    for place, piece in enumerate(pieces):
        if piece.special:
            close(decoder.decode(b"", final=True))
            waiting = []
            texts[place] = piece.text
            continue
        out = decoder.decode(piece.data)
        inside[place] = bool(waiting) and bool(piece.data) and not "\udc80" <= out[:1] <= "\udcff"
        texts[place] += close(out)
        left = len(decoder.getstate()[0])
        waiting = [place] * left if out else waiting + [place] * (left - len(waiting))
    close(decoder.decode(b"", final=True))
    # A character that is never completed shows its bytes where they are, so no token is inside it.
    return texts, [within and not "\udc80" <= text[:1] <= "\udcff" for within, text in zip(inside, texts, strict=True)]


def _decoder_steps(tokenizer: "PreTrainedTokenizerBase") -> list[dict[str, Any]]:
    """List the steps of the tokenizer's decoder."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Map letters of byte-level vocabularies to bytes.

    Printable Latin-1 stands for itself, U+0100 and on for the rest (GPT-2's rule).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
