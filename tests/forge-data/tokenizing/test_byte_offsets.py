"""Places that follow from what tokens spell are those that the tokenizer tells."""

import pytest
from hypothesis import given, strategies as st
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from forge_data.tokenizing._encoder import Encoder

from ..families import FAMILIES
from ..nasty import BLANKS, LOOK_ALIKES, WORDS

TEXTS = st.lists(st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *BLANKS]), max_size=6).map("".join), min_size=2, max_size=5)
LEVELS = sorted(name for name, family in FAMILIES.items() if family.make in ("bytes", "tiktoken"))


def same(encoder, texts):
    """Ids, places and sizes, as they are made and as the tokenizer tells them."""
    made, told = encoder._bytes.of(texts), encoder._told(texts, special=False)
    assert [made[0].tolist(), made[1].tolist(), made[2]] == [told[0].tolist(), told[1].tolist(), told[2]]
    assert (made[0].dtype, made[1].dtype) == (told[0].dtype, told[1].dtype)


@pytest.mark.parametrize("trim_offsets", [True, False])
@given(texts=TEXTS)
def test_as_told(tokenizers, trim_offsets, texts):
    """Characters of several bytes, tokens of half a character, blanks, look-alikes: the same places."""
    same(Encoder(tokenizers["chatml", trim_offsets]), texts)


@pytest.mark.parametrize("family", LEVELS)
def test_every_family(family):
    """The same for the tokenizers of real families, all pieces in one batch; none of them has to be asked."""
    encoder = Encoder(FAMILIES[family].tokenizer())
    texts = [f"{a}x{b}{a}" for a in [*LOOK_ALIKES, *WORDS] for b in BLANKS]
    same(encoder, texts)
    assert encoder._bytes._works == (not FAMILIES[family].swallows)


@given(texts=TEXTS)
def test_a_normalizer_is_seen(tokenizers, texts):
    """Where the tokens spell another text than the one that was given, the tokenizer tells their places."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers["chatml", True].backend_tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    try:
        same(Encoder(tokenizer), ["e\u0301 a", "plain", "\u212b", *texts, "plain", "plain", "plain"])
    finally:
        tokenizer.backend_tokenizer.normalizer = None


def test_another_vocabulary_is_asked():
    """A vocabulary that is not of bytes is left to the tokenizer."""
    assert not Encoder(FAMILIES["llama-2"].tokenizer())._bytes._works


def test_a_tokenizer_of_ones_own_is_asked(chatml_tokenizer):
    """Whoever overrides what leads to the backend gets ids from what was overridden."""

    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **named):
            return super()._encode_plus(text.upper() if isinstance(text, str) else [each.upper() for each in text], **named)

    encoder = Encoder(Own(tokenizer_object=chatml_tokenizer.backend_tokenizer))
    assert not encoder._bytes._works
    same(encoder, ["what", "is it"])


def test_truncation_is_off(chatml_tokenizer):
    """A tokenizer that was told to truncate or to pad does neither to a row."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chatml_tokenizer.backend_tokenizer, pad_token="a")
    encoder = Encoder(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    ids, _, sizes = encoder._bytes.of(["one two three four"] * 3)
    assert len(ids) == sum(sizes) > 6
    assert sizes[0] < 50
