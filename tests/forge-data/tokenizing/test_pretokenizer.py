"""Python's expressions for known tokenizers cut text as the tokenizers do."""

from itertools import product

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from forge_data.tokenizing._pretokenizer import added_tokens, cutter

from ..nasty import BLANKS, LOOK_ALIKES, WORDS

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern, behavior="isolated", *, digits=False):
    """Make a pre-tokenizer as Llama-3's and Qwen2's; with `digits` as SmolLM2's, which cuts by ByteLevel's expression."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=digits)
    first = pre_tokenizers.Digits(individual_digits=True) if digits else pre_tokenizers.Split(Regex(pattern), behavior)
    return pre_tokenizers.Sequence([first, spell])


KNOWN = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt-2, digits": split("", digits=True),
    "llama-3": split(CL100K),
    "qwen2": split(CL100K.replace("{1,3}", "")),
}


def backend(pre_tokenizer, normalizer=None, added=()):
    made = Tokenizer(models.BPE())
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_tokens(list(added))
    return made


def own(pre_tokenizer, text):
    """Return the pieces that the tokenizer cuts a text into."""
    return [text[start:stop] for _, (start, stop) in pre_tokenizer.pre_tokenize_str(text)]


def cut(name, text):
    """Return the pieces of the cutter, with stretches that are not ASCII cut by the tokenizer."""
    pieces = cutter(backend(KNOWN[name]))(text)
    return [part for piece in pieces for part in ([piece] if piece.isascii() else own(KNOWN[name], piece))]


@pytest.mark.parametrize("name", KNOWN)
def test_every_short_text(name):
    """Agree on all texts of up to four characters of each kind that an expression distinguishes."""
    cuts = cutter(backend(KNOWN[name]))
    for size in range(1, 5):
        for letters in product("aSre1 \n\r\t'.", repeat=size):
            text = "".join(letters)
            assert cuts(text) == own(KNOWN[name], text)


@pytest.mark.parametrize("name", KNOWN)
def test_every_ascii_character(name):
    """Agree on every ASCII character between any two kinds of others."""
    cuts = cutter(backend(KNOWN[name]))
    for character in map(chr, range(128)):
        for before, after in product(["", "a", "1", " ", ".", "\n", "'", "  "], repeat=2):
            text = before + character + after
            assert cuts(text) == own(KNOWN[name], text)


@pytest.mark.parametrize("name", KNOWN)
@given(text=st.text(st.characters(codec="ascii"), max_size=60))
def test_ascii(name, text):
    """Agree on any ASCII text."""
    assert cut(name, text) == own(KNOWN[name], text)


@pytest.mark.parametrize("name", KNOWN)
@given(text=st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *BLANKS, "word ", " and", "don't", "²", "中文", "ſ"])).map("".join))
def test_any_text(name, text):
    """Stretches of other scripts give alone the pieces that they give in their text."""
    assert cut(name, text) == own(KNOWN[name], text)


def test_a_stretch_is_no_longer_than_it_must_be():
    """One character that is not ASCII leaves all but its neighbours to the cache."""
    assert cutter(backend(KNOWN["gpt-2"]))("it is a naïve idea") == ["it", " is", " a", " naïve", " idea"]


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer"),
    [
        (None, None),
        (pre_tokenizers.Whitespace(), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), None),
        (split(CL100K + "|x"), None),
        (split(CL100K, "removed"), None),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(), KNOWN["gpt-2"]]), None),
        (KNOWN["gpt-2"], normalizers.Lowercase()),
        (KNOWN["gpt-2"], normalizers.Sequence([normalizers.NFC()])),
    ],
)
def test_others_are_not_known(pre_tokenizer, normalizer):
    """Any other pre-tokenizer, and text that is normalized before, has no cutter."""
    assert cutter(backend(pre_tokenizer, normalizer)) is None


def test_added_tokens():
    """The longest of the tokens that begin at a place is found, whatever its letters."""
    tokens = [AddedToken(token, normalized=False) for token in ("<a>", "<a><b>", "(.*)", "<｜é｜>")]
    found, ids = added_tokens(backend(None, added=tokens))
    assert found.split("x<a><b>y<a>(.*).<｜é｜>")[1::2] == ["<a><b>", "<a>", "(.*)", "<｜é｜>"]
    assert list(ids) == ["<a>", "<a><b>", "(.*)", "<｜é｜>"]


@pytest.mark.parametrize(
    ("tokens", "normalizer"),
    [
        ([AddedToken("<a>", normalized=False, lstrip=True)], None),
        ([AddedToken("<a>", normalized=False, rstrip=True)], None),
        ([AddedToken("<a>", normalized=False, single_word=True)], None),
        ([AddedToken("<a>", normalized=False), AddedToken("<b>", normalized=True)], None),
        ([AddedToken("<a>", normalized=True)], normalizers.NFC()),
    ],
)
def test_added_tokens_that_more_decides(tokens, normalizer):
    """Tokens that take blanks along, need a word border, or are searched in normalized text have no expression."""
    assert added_tokens(backend(None, normalizer, tokens)) is None


def test_no_added_tokens():
    """Nothing is found where there are none."""
    found, ids = added_tokens(backend(None))
    assert (found.split("abc"), ids) == (["abc"], {})
