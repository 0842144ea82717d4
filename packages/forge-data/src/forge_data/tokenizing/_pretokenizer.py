"""How a byte-level tokenizer cuts a text into the pieces that it tokenises each for itself, for those that are known.

Most tokenizers of today cut by one of a few regular expressions. They stand here as Python's, for ASCII, of which both think alike.
Of other text the stretches that are not ASCII are left whole. They begin and end between a letter and white space (or with the text),
and there every one of these expressions ends a piece whatever stands before and after, so a stretch falls into the same pieces alone.
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
# Digits are cut out first, one by one, so no blank goes with one, and before one a text ends.
_GPT2_DIGITS = rf"{_SUFFIX}| ?[A-Za-z]+|[0-9]| ?[^{_BLANK}A-Za-z0-9]+|[{_BLANK}]+(?![^{_BLANK}0-9])|[{_BLANK}]+"
_LLAMA3 = rf"{_ANY_SUFFIX}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,3}}|{_NEWLINES}"
_QWEN2 = rf"{_ANY_SUFFIX}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]|{_NEWLINES}"

_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _LLAMA3,
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _QWEN2,
}
"""The expressions of Llama-3 (OpenAI's cl100k, Phi-4, OLMo-2) and of Qwen2 (and 2.5, 3)."""
_ODD = re.compile(r"[^\x00-\x7f]+")
_LAST_PLACE = re.compile(rf"(?s:.*)[A-Za-z](?=[{_BLANK}])")
_NEXT_PLACE = re.compile(rf"[A-Za-z](?=[{_BLANK}])")


def cutter(backend: Any) -> Cut | None:
    """What cuts a text without added tokens into the pieces that this backend does; None where they are not known.

    A piece that is not ASCII is a stretch that holds any number of the backend's own: it is for all of the backend to tokenise.
    """
    pattern = _pattern(_told(backend.pre_tokenizer))
    # NFC leaves ASCII as it is, and joins nothing to the white space that a stretch begins with.
    if pattern is None or _told(backend.normalizer)["type"] not in ("NFC", None):
        return None
    pieces = re.compile(pattern).findall

    def cut(text: str) -> list[str]:
        if text.isascii():
            return pieces(text)
        found: list[str] = []
        at = 0
        while odd := _ODD.search(text, at):
            before = _LAST_PLACE.match(text, at, odd.start())
            after = _NEXT_PLACE.search(text, odd.end())
            begin = before.end() if before else at
            end = after.end() if after else len(text)
            found += pieces(text[at:begin])
            found.append(text[begin:end])
            at = end
        return found + pieces(text[at:])

    return cut


def added_tokens(backend: Any) -> "tuple[re.Pattern[str], dict[str, int]] | None":
    """What finds added tokens in a text, as one group, and their ids; None where more than their letters decides."""
    tokens = {number: token for number, token in backend.get_added_tokens_decoder().items() if token.content}
    # Those of a normalized text are looked for after the others, in what these leave of it.
    normalized = {token.normalized for token in tokens.values()}
    one_kind = normalized <= {False} or (normalized == {True} and backend.normalizer is None)
    if not one_kind or any(token.single_word or token.lstrip or token.rstrip for token in tokens.values()):
        return None
    ids = {token.content: number for number, token in tokens.items()}
    longest_first = [re.escape(content) for content in sorted(ids, key=lambda content: -len(content))]
    return re.compile(f"({'|'.join(longest_first) or '(?!)'})"), ids


def _told(part: Any) -> dict[str, Any]:
    """A part of a backend as it describes itself."""
    return {"type": None} if part is None else json.loads(part.__getstate__())


def _pattern(told: dict[str, Any]) -> str | None:
    """The expression for a pre-tokenizer, as it describes itself."""
    match told["pretokenizers"] if told["type"] == "Sequence" else [told]:
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
