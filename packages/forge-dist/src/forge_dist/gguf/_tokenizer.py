"""Fields of a GGUF file for a fast tokenizer, proved by one rebuilt from them alone.

Readers split text by a rule that the file only names (`tokenizer.ggml.pre`): the names and rules below are llama.cpp's
(llama-vocab.cpp).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from forge_dist._errors import ModelError
from forge_dist.gguf._sentencepiece import (
    CONTROL,
    NORMAL,
    SPACE,
    UNUSED,
    USER_DEFINED,
    is_sentencepiece,
    joined_by_readers,
    only_first_has_space,
    sentencepiece_fields,
    sentencepiece_reader,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD = r"[^\r\n\p{L}\p{N}]?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _WORD + r"\p{L}+|"
_LLAMA3 = _SHORT + r"\p{N}{1,3}" + _REST
_QWEN2 = _SHORT + r"\p{N}" + _REST
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LARGE, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = f"{_WORD}{_LARGE}*{_SMALL}+|{_WORD}{_LARGE}+{_SMALL}*|" + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    f"{_WORD}{_LARGE}*{_SMALL}+{_ENDING}|{_WORD}{_LARGE}+{_SMALL}*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def _split(pattern: str) -> tuple[dict[str, Any], ...]:
    return ({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _BYTES)


class PreTokenizerRule(NamedTuple):
    """Pre-tokenizer: how text is split before merges are applied."""

    steps: tuple[dict[str, Any], ...]
    """Steps as in tokenizer.json."""
    ignore_merges: bool
    """Whether a piece that is a token is taken without applying merges."""


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizerRule(({**_BYTES, "use_regex": True},), ignore_merges=False),
    "smollm": PreTokenizerRule(
        ({"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}), ignore_merges=False
    ),
    "llama-bpe": PreTokenizerRule(_split(_LLAMA3), ignore_merges=True),
    "smaug-bpe": PreTokenizerRule(_split(_LLAMA3), ignore_merges=False),
    "qwen2": PreTokenizerRule(_split(_QWEN2), ignore_merges=False),
    "gpt-4o": PreTokenizerRule(_split(_GPT4O), ignore_merges=False),
    "tekken": PreTokenizerRule(_split(_TEKKEN), ignore_merges=True),
}
"""`tokenizer.ggml.pre` → its rule."""

Texts = Literal["every text", "texts that begin with a special token", "texts of no added tokens that begin with no space"]
"""Texts to which readers of a file give the ids that the tokenizer gives."""

PROBES = (
    "Hello, world! It's 2026: 3.14159 and 1234567 apples; don't SHOUT, WE'LL see.",
    "\n\n\tdef f(x):\r\n        return x ** 2  # a  comment   with spaces \n\n\n",
    "naïve café, Straße, русский текст, 日本語のテキスト, العربية, हिन्दी, 🙂👩‍👩‍👧 ½ Ⅷ ²",
    " leading and trailing ",
    "camelCaseWords/and/paths\\n CONSTANT_NAMES 100%|~^`",
)
"""Texts for which a tokenizer and the one rebuilt from the file's fields must give the same ids."""


_PHI3 = re.compile("(phi)-?(3)", re.IGNORECASE)
"""Names of models behind whose added tokens llama.cpp takes white space away (llama-vocab.cpp, by general.name)."""

_PHI3_KEEPS = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Tokens behind which it does not."""

_PHI3_NEEDS = _PHI3_KEEPS | {"</s>"}
"""Tokens without which llama.cpp does not load a model of such a name."""


def tokenizer_fields(tokenizer: "PreTrainedTokenizerBase", vocab_size: int, where: Path, name: str = "model") -> dict[str, Any]:
    """Return GGUF's keys and values for a BPE tokenizer, byte-level or sentencepiece's.

    Tokens, their kinds, merges, pre-tokenizer, special ids, chat template, and the name of the model, by which llama.cpp knows
    that white space behind added tokens is no text. Ids of the model that the tokenizer does not have become unused tokens.

    Raises:
        ModelError: it is of another kind, splits text by a rule that llama.cpp has no name for, or has more tokens than the
            model.
    """
    fast: Any = tokenizer
    if not getattr(fast, "is_fast", False):
        raise ModelError(
            f"{where}: its tokenizer is a {type(fast).__name__}, which has no tokenizer.json, of which GGUF's is made; use "
            "format=hf"
        )
    backend = json.loads(fast.backend_tokenizer.to_str())
    pieces = is_sentencepiece(backend["model"])
    pre = "" if pieces else _rule_of(backend, where)
    left_out = _without_embedding(fast, vocab_size)
    vocabulary = {token: index for token, index in fast.get_vocab().items() if token not in left_out}
    if max(vocabulary.values()) >= vocab_size:
        raise ModelError(f"{where}: the tokenizer has the id {max(vocabulary.values())}, and the model {vocab_size} embeddings")
    # Readers load no file that has a token twice.
    tokens = [f"[PAD{index}]" if f"[PAD{index}]" not in vocabulary else f"[PAD{index}]]" for index in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    for token, index in vocabulary.items():
        tokens[index], kinds[index] = token, NORMAL
    for added in backend["added_tokens"]:
        if added["content"] in left_out:
            continue
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    begin, end = _special_tokens_around(fast)
    fields = {
        "general.name": _name_for_readers(name, backend, vocabulary),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": fast.bos_token_id,
        "tokenizer.ggml.eos_token_id": fast.eos_token_id,
        "tokenizer.ggml.unknown_token_id": fast.unk_token_id,
        "tokenizer.ggml.padding_token_id": fast.pad_token_id,
        "tokenizer.ggml.add_bos_token": begin,
        "tokenizer.ggml.add_eos_token": end,
        "tokenizer.ggml.add_space_prefix": pieces and _space_comes_first(fast),
        **_templates(fast),
    }
    if pieces:
        fields |= sentencepiece_fields(backend, tokens, kinds, where)
    else:
        merges = backend["model"]["merges"]
        fields["tokenizer.ggml.merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    fields = {key: value for key, value in fields.items() if value is not None}
    _prove_fields(fast, fields, left_out, where)
    return fields


def _without_embedding(tokenizer: Any, vocab_size: int) -> set[str]:
    """Return special tokens that the model has no embedding of, and that no prompt has.

    Gemma 3's models of text alone have none of the token for images.
    """
    template = _template(tokenizer) or ""
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    return {
        token.content
        for index, token in tokenizer.added_tokens_decoder.items()
        if index >= vocab_size and token.special and token.content not in used and token.content not in template
    }


def same_texts(tokenizer: "PreTrainedTokenizerBase") -> Texts:
    """Return to which texts readers of a file give the tokenizer's ids."""
    fast: Any = tokenizer
    backend = json.loads(fast.backend_tokenizer.to_str())
    if not is_sentencepiece(backend["model"]) or not only_first_has_space(backend):
        return "every text"
    if fast.bos_token is not None and "bos_token" in (_template(fast) or ""):
        return "texts that begin with a special token"
    return "texts of no added tokens that begin with no space"


def _space_comes_first(tokenizer: Any) -> bool:
    """Return whether readers are to put a space before texts, and after special tokens."""
    if same_texts(tokenizer) == "texts that begin with a special token":
        return False
    return tokenizer.tokenize("a", add_special_tokens=False)[0].startswith(SPACE)


def _name_for_readers(name: str, backend: Mapping[str, Any], vocabulary: Mapping[str, int]) -> str:
    """Return a name with which readers strip text behind added tokens as the tokenizer does."""
    if vocabulary.keys() >= _PHI3_NEEDS and any(token["rstrip"] for token in backend["added_tokens"]):
        return name if _PHI3.search(name) else f"Phi-3 {name}"
    return _PHI3.sub(r"\1 \2", name)


def reader_of(fields: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """Return what readers of the `fields` do with a text.

    Without the tokens that they put before and after it.
    """
    pieces = fields["tokenizer.ggml.model"] == "llama"
    of_rest = sentencepiece_reader(fields) if pieces else _byte_level_reader(fields)
    kinds = fields["tokenizer.ggml.token_type"]
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    added = {token: index for index, token in enumerate(tokens) if kinds[index] in (CONTROL, USER_DEFINED)}
    strips = added.keys() - _PHI3_KEEPS if _PHI3.search(fields["general.name"]) else set()
    longest_first = [(token, token in strips) for token in sorted(added, key=lambda token: -len(token.encode()))]

    def read(text: str) -> list[int]:
        found: list[int] = []
        for piece in _split_at(text, longest_first):
            found += [added[piece]] if piece in added else of_rest(piece)
        return found

    return read


def _split_at(text: str, tokens: Sequence[tuple[str, bool]]) -> list[str]:
    """Split a text at all places of the first token, the rest at those of the second, and so on.

    Beside each token: whether white space behind it is dropped.
    """
    pieces, cut = [text], set()
    for token, strips in tokens:
        if token in text:
            around = re.compile(f"({re.escape(token)})" + r"\s*" * strips)
            pieces = [part for piece in pieces for part in ([piece] if piece in cut else around.split(piece)) if part]
            cut.add(token)
    return pieces


def _byte_level_reader(fields: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """Build the byte-level tokenizer that readers make of the `fields`.

    For texts without special tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    rule = PRE_TOKENIZERS[fields["tokenizer.ggml.pre"]]
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignore_merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([_step(step) for step in rule.steps])
    return lambda text: made.encode(text).ids


def _step(step: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if step["type"] == "Split":
        return pre_tokenizers.Split(Regex(step["pattern"]["Regex"]), behavior=step["behavior"].lower(), invert=step["invert"])
    if step["type"] == "Digits":
        return pre_tokenizers.Digits(individual_digits=step["individual_digits"])
    return pre_tokenizers.ByteLevel(add_prefix_space=step["add_prefix_space"], use_regex=step["use_regex"])


def _rule_of(backend: dict[str, Any], where: Path) -> str:
    """Return the name of the rule by which a tokenizer splits text."""
    model, normalizer = backend["model"], backend["normalizer"]
    if model["type"] != "BPE":
        raise ModelError(
            f"{where}: its tokenizer is {model['type']}, and only BPE is written as GGUF here; use format=hf, or convert "
            "that with llama.cpp's convert_hf_to_gguf.py"
        )
    steps = backend["pre_tokenizer"] or {}
    flat = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    found = tuple({key: value for key, value in step.items() if key != "trim_offsets"} for step in flat)
    if normalizer is not None and normalizer != {"type": "NFC"}:
        raise ModelError(
            f"{where}: its tokenizer changes text first ({normalizer.get('type')}), which GGUF cannot say; use format=hf"
        )
    alike = [name for name, rule in PRE_TOKENIZERS.items() if found == rule.steps]
    same = [name for name in alike if PRE_TOKENIZERS[name].ignore_merges == bool(model.get("ignore_merges"))]
    if same or (alike and _merges_make_each_token(backend)):
        return (same or alike)[0]
    raise ModelError(
        f"{where}: its tokenizer splits text by a rule that is not among those whose names in GGUF are known here "
        f"({', '.join(PRE_TOKENIZERS)}): "
        f"{json.dumps(flat, ensure_ascii=False)[:300]}; use format=hf"
    )


def _merges_make_each_token(backend: dict[str, Any]) -> bool:
    """Return whether it does not matter if a piece that is a token is taken without merges."""
    from tokenizers import models

    vocabulary = backend["model"]["vocab"]
    merges: Any = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in backend["model"]["merges"]]
    made = models.BPE(vocab=vocabulary, merges=merges)
    added = {token["content"] for token in backend["added_tokens"]}
    return all(len(made.tokenize(token)) == 1 for token in vocabulary if token not in added)


def _special_tokens_around(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether a text gets the begin-of-text token, and the end-of-text token."""
    plain, full = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    begins = bool(full) and full[0] == tokenizer.bos_token_id and full[0] != plain[0]
    return begins, bool(full) and full[-1] == tokenizer.eos_token_id and full[-1] != plain[-1]


def _template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _templates(tokenizer: Any) -> dict[str, Any]:
    """Return the field of the chat template, and those of further ones (`tool_use`)."""
    given = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    further = {re.sub("[^0-9A-Za-z]", "_", name): text for name, text in given.items() if name != "default"}
    return {
        "tokenizer.chat_template": _template(tokenizer),
        **{f"tokenizer.chat_template.{name}": text for name, text in further.items()},
        "tokenizer.chat_templates": sorted(further) or None,
    }


def _prove_fields(tokenizer: Any, fields: Mapping[str, Any], left_out: set[str], where: Path) -> None:
    """Raise ModelError unless the tokenizer of the fields gives the same ids for every probe."""
    read = reader_of(fields)
    begin = [fields["tokenizer.ggml.bos_token_id"]] if fields["tokenizer.ggml.add_bos_token"] else []
    end = [fields["tokenizer.ggml.eos_token_id"]] if fields["tokenizer.ggml.add_eos_token"] else []
    for text in _probes(tokenizer, left_out):
        expected = tokenizer(text).input_ids
        found = begin + read(text) + end
        if found != expected:
            at = next(
                (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
            )
            raise ModelError(
                f"{where}: its tokenizer is more than GGUF can say: {text[:60]!r} becomes other ids from the {at}th on "
                f"({expected[at : at + 4]}, by the file {found[at : at + 4]}); use format=hf"
            )


def _probes(tokenizer: Any, left_out: set[str]) -> list[str]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content not in left_out]
    special = "".join(f"a {token} b{token}\n" for token in added)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    joined = [token.replace(SPACE, " ") for token in joined_by_readers(model)] if is_sentencepiece(model) else []
    probes = [*PROBES, special, *joined, *_overlapping(added)]
    texts = same_texts(tokenizer)
    if texts == "every text":
        return probes
    if texts == "texts that begin with a special token":
        return [tokenizer.bos_token + text for text in probes]
    return [text for text in probes if not text.startswith(" ") and not any(token in text for token in added)]


def _overlapping(tokens: Sequence[str]) -> set[str]:
    """Return texts in which a token begins within another.

    Readers take the longer one, tokenizers the one that comes first.
    """
    begin: dict[str, list[str]] = {}
    for token in tokens:
        for length in range(1, len(token)):
            begin.setdefault(token[:length], []).append(token)
    return {
        token + other[length:]
        for token in tokens
        for length in range(1, len(token))
        for other in begin.get(token[-length:], ())
    }
