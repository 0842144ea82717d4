"""BPE of sentencepiece as fields of a GGUF file, and the ids that readers give by them.

A fast tokenizer has the order of its merges in place of sentencepiece's scores. Either decides which two neighbours become one
token next; readers take the scores (llama.cpp's llm_tokenizer_spm_session).
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_dist._errors import ModelError

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
"""Kinds of tokens, as in the gguf library's TokenType."""

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What stands for a space in tokens."""


_SPACES_ALONE = (
    {"type": "Prepend", "prepend": SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
)
"""What readers do to a text before they split it, as normalizers of tokenizer.json."""


def is_sentencepiece(model: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json's model is sentencepiece's BPE, with bytes as a fallback."""
    return model["type"] == "BPE" and bool(model.get("byte_fallback"))


def only_first_has_space(backend: Mapping[str, Any]) -> bool:
    """Return whether a space goes before a text that has none, but not after special tokens.

    transformers makes tokenizers of Llama 2 and of Mistral's first models so; readers put one before both, or before none.
    """
    step = backend["pre_tokenizer"] or {}
    return step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"


def sentencepiece_fields(backend: Mapping[str, Any], tokens: list[str], kinds: list[int], where: Path) -> dict[str, Any]:
    """Return the fields that differ from those of byte-level BPE.

    Args:
        backend: the tokenizer.json.
        tokens: text of each id.
        kinds: kind of each id.
        where: file to be written, for the message.

    Raises:
        ModelError: a byte has no token, or text is changed before it is split.
    """
    lost = sorted(set(map(_byte, range(256))) - set(tokens))
    if lost:
        raise ModelError(
            f"{where}: its tokenizer has no token for the byte {lost[0]}, which readers of GGUF need; use format=hf"
        )
    steps = backend["normalizer"] or {"type": "Sequence", "normalizers": []}
    for step in steps["normalizers"] if steps["type"] == "Sequence" else [steps]:
        if step not in _SPACES_ALONE:
            changed = f" {step['pattern']}" if step["type"] == "Replace" else ""
            raise ModelError(
                f"{where}: its tokenizer changes text first ({step['type']}{changed}), which GGUF cannot say; use format=hf"
            )
    merges = [merge.replace(" ", "") if isinstance(merge, str) else "".join(merge) for merge in backend["model"]["merges"]]
    # A token has several merges, one after the other: its first decides.
    score = {token: -float(rank) for rank, token in reversed(list(enumerate(merges)))}
    of_bytes = set(map(_byte, range(256)))
    plain = [kind == USER_DEFINED and SPACE in token for token, kind in zip(tokens, kinds, strict=True)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        # Readers look for these in the text as it is, before spaces are replaced in it.
        "tokenizer.ggml.tokens": [
            token.replace(SPACE, " ") if own else token for token, own in zip(tokens, plain, strict=True)
        ],
        "tokenizer.ggml.scores": [score.get(token, -float(len(merges) + 1)) for token in tokens],
        "tokenizer.ggml.token_type": [BYTE if token in of_bytes else kind for token, kind in zip(tokens, kinds, strict=True)],
    }


def joined_by_readers(model: Mapping[str, Any]) -> list[str]:
    """Return tokens that are two others in a row which the tokenizer does not merge.

    Readers take any two neighbours whose texts make a token for one. sentencepiece's own tokenizers merge them too; one that
    `tokenizers` trained need not.
    """
    merges = {merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]}
    known = model["vocab"]
    return [
        token
        for token in known
        if any(
            token[:at] in known and token[at:] in known and f"{token[:at]} {token[at:]}" not in merges
            for at in range(1, len(token))
        )
    ]


def sentencepiece_reader(fields: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """Return what readers do with a text without special tokens, by its fields.

    They merge the neighbours with the best score.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    scores = fields["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    prefix = " " if fields["tokenizer.ggml.add_space_prefix"] else ""

    def merge(text: str) -> list[int]:
        symbols = list((prefix + text).replace(" ", SPACE))
        while True:
            pairs = [(scores[ids[pair]], -at) for at, pair in _pairs(symbols) if pair in ids]
            if not pairs:
                return [number for symbol in symbols for number in _ids(symbol, ids)]
            at = -max(pairs)[1]
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]

    return merge


def _pairs(symbols: list[str]) -> list[tuple[int, str]]:
    return [(at, first + second) for at, (first, second) in enumerate(pairwise(symbols))]


def _ids(symbol: str, ids: Mapping[str, int]) -> list[int]:
    """Return the id of a symbol, or those of its bytes."""
    return [ids[symbol]] if symbol in ids else [ids[_byte(number)] for number in symbol.encode()]


def _byte(number: int) -> str:
    return f"<0x{number:02X}>"
