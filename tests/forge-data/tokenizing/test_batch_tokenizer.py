"""Tokens and offsets from the word cache equal those of the tokenizer."""

import pytest
from hypothesis import given, strategies as st
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from forge_data.tokenizing._batch_tokenizer import BatchTokenizer

from ..families import FAMILIES
from ..nasty import BLANKS, LOOK_ALIKES, WORDS

TEXTS = st.lists(st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *BLANKS]), max_size=6).map("".join), min_size=2, max_size=5)
LEVELS = sorted(name for name, family in FAMILIES.items() if family.make in ("bytes", "tiktoken"))


def same(tokenize, texts):
    """Check ids, offsets and sizes against the tokenizer's own."""
    made, expected = tokenize(texts, special=False), tokenize._by_tokenizer(texts, special=False)
    assert [made.ids.tolist(), made.offsets.tolist(), made.sizes] == [
        expected.ids.tolist(),
        expected.offsets.tolist(),
        expected.sizes,
    ]
    assert (made.ids.dtype, made.offsets.dtype) == (expected.ids.dtype, expected.offsets.dtype)


@pytest.mark.parametrize("trim_offsets", [True, False])
@given(texts=TEXTS)
def test_as_the_tokenizer(tokenizers, trim_offsets, texts):
    """Characters of several bytes, tokens of half a character, blanks and look-alikes have the same offsets."""
    same(BatchTokenizer(tokenizers["chatml", trim_offsets]), texts)


@pytest.mark.parametrize("family", LEVELS)
def test_every_family(family):
    """The tokenizers of real byte-level families agree with their cache, unless a special token takes blanks along."""
    tokenize = BatchTokenizer(FAMILIES[family].tokenizer())
    texts = [f"{a}x{b}{a}" for a in [*LOOK_ALIKES, *WORDS] for b in BLANKS]
    assert tokenize.uses_cache == (not FAMILIES[family].swallows)
    same(tokenize, texts)
    assert tokenize.uses_cache == (not FAMILIES[family].swallows)


@given(texts=TEXTS)
def test_a_normalizer_is_seen(tokenizers, texts):
    """Where the tokens spell another text than was given, the tokenizer's own offsets are used."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers["chatml", True].backend_tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    try:
        same(BatchTokenizer(tokenizer), ["e\u0301 a", "plain", "\u212b", *texts, "plain", "plain", "plain"])
    finally:
        tokenizer.backend_tokenizer.normalizer = None


def test_another_vocabulary_is_asked():
    """A vocabulary that is not byte-level has no cache."""
    assert not BatchTokenizer(FAMILIES["llama-2"].tokenizer()).uses_cache


def test_a_tokenizer_of_ones_own_is_asked(chatml_tokenizer):
    """A tokenizer with overridden methods is asked itself."""

    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **named):
            return super()._encode_plus(text.upper() if isinstance(text, str) else [each.upper() for each in text], **named)

    tokenize = BatchTokenizer(Own(tokenizer_object=chatml_tokenizer.backend_tokenizer))
    assert not tokenize.uses_cache
    same(tokenize, ["what", "is it"])


def test_truncation_is_off(chatml_tokenizer):
    """A tokenizer with truncation or padding switched on truncates and pads no row."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chatml_tokenizer.backend_tokenizer, pad_token="a")
    tokenize = BatchTokenizer(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    ids, _, sizes = tokenize(["one two three four"] * 3, special=False)
    assert len(ids) == sum(sizes) > 6
    assert sizes[0] < 50
