"""Text → the pieces that a byte-level tokenizer tokenises each alone, if it is known.

Most tokenizers of today cut by one of a few regular expressions. They are here as Python's, for ASCII, for which both engines
agree. In other text the stretches that are not ASCII stay whole. They begin and end between a letter and white space (or with
the text), where each of these expressions ends a piece whatever comes before and after, so a stretch gives the same pieces
alone.
"""

import json
import re
from collections.abc import Callable
from typing import Any

Cut = Callable[[str], list[str]]

_BLANK = r" \t\n\r\x0b\x0c"
_SUFFIX = r"'(?:[stmd]|re|ve|ll)"
_ANY_SUFFIX = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_LAST_BLANK = rf"[{_BLANK}]+(?![^{_BLANK}])|[{_BLANK}]+"
_NEWLINES = rf" ?[^{_BLANK}A-Za-z0-9]+[\r\n]*|[{_BLANK}]*[\r\n]+|{_LAST_BLANK}"

_GPT2 = rf"{_SUFFIX}| ?[A-Za-z]+| ?[0-9]+| ?[^{_BLANK}A-Za-z0-9]+|{_LAST_BLANK}"
# Digits are cut out first, one by one, so no space goes with a digit, and text ends before one.
_GPT2_DIGITS = rf"{_SUFFIX}| ?[A-Za-z]+|[0-9]| ?[^{_BLANK}A-Za-z0-9]+|[{_BLANK}]+(?![^{_BLANK}0-9])|[{_BLANK}]+"
_LLAMA3 = rf"{_ANY_SUFFIX}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,3}}|{_NEWLINES}"
_QWEN2 = rf"{_ANY_SUFFIX}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]|{_NEWLINES}"

_SPLIT_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPLIT_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    rf"{_SPLIT_WORDS}|\p{{N}}{{1,3}}|{_SPLIT_REST}": _LLAMA3,
    rf"{_SPLIT_WORDS}|\p{{N}}|{_SPLIT_REST}": _QWEN2,
}
"""Expressions of Llama-3 (OpenAI's cl100k, Phi-4, OLMo-2) and of Qwen2 (and 2.5, 3)."""
_NON_ASCII = re.compile(r"[^\x00-\x7f]+")
_CUT_BEFORE = re.compile(rf"(?s:.*)[A-Za-z](?=[{_BLANK}])")
_CUT_AFTER = re.compile(rf"[A-Za-z](?=[{_BLANK}])")


def cutter(backend: Any) -> Cut | None:
    """Return what cuts a text without added tokens into the backend's pieces; None if not known.

    A piece that is not ASCII is a stretch of any number of the backend's pieces; the whole backend must tokenise it.
    """
    pattern = _pattern(_state(backend.pre_tokenizer))
    # NFC leaves ASCII as it is, and joins nothing to the white space that a stretch begins with.
    if pattern is None or _state(backend.normalizer)["type"] not in ("NFC", None):
        return None
    pieces = re.compile(pattern).findall

    def cut(text: str) -> list[str]:
        if text.isascii():
            return pieces(text)
        found: list[str] = []
        at = 0
        while match := _NON_ASCII.search(text, at):
            before = _CUT_BEFORE.match(text, at, match.start())
            after = _CUT_AFTER.search(text, match.end())
            begin = before.end() if before else at
            end = after.end() if after else len(text)
            found += pieces(text[at:begin])
            found.append(text[begin:end])
            at = end
        return found + pieces(text[at:])

    return cut


def added_tokens(backend: Any) -> "tuple[re.Pattern[str], dict[str, int]] | None":
    """Return an expression that finds added tokens in a text, as one group, and their ids.

    None where more than the token's letters decides whether it is found.
    """
    tokens = {number: token for number, token in backend.get_added_tokens_decoder().items() if token.content}
    # Tokens of normalized text are searched after the others, in the rest of the text.
    normalized = {token.normalized for token in tokens.values()}
    one_kind = normalized <= {False} or (normalized == {True} and backend.normalizer is None)
    if not one_kind or any(token.single_word or token.lstrip or token.rstrip for token in tokens.values()):
        return None
    ids = {token.content: number for number, token in tokens.items()}
    longest_first = [re.escape(content) for content in sorted(ids, key=lambda content: -len(content))]
    return re.compile(f"({'|'.join(longest_first) or '(?!)'})"), ids


def _state(part: Any) -> dict[str, Any]:
    """Return the description that a part of a backend gives of itself."""
    return {"type": None} if part is None else json.loads(part.__getstate__())


def _pattern(state: dict[str, Any]) -> str | None:
    """Return the expression that a described pre-tokenizer cuts by, if it is known."""
    match state["pretokenizers"] if state["type"] == "Sequence" else [state]:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return _GPT2_DIGITS
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return _SPLITS.get(pattern)
        case _:
            return None
