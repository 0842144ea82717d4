"""Ids from the word cache are those that the tokenizer gives."""

import random
import string

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from forge_data.tokenizing import _word_cache
from forge_data.tokenizing._batch_tokenizer import BatchTokenizer
from forge_data.tokenizing._word_cache import word_cache

from ..families import FAMILIES
from ..nasty import BLANKS, LOOK_ALIKES, WORDS
from .test_pretokenizer import KNOWN

TEXTS = st.lists(
    st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *BLANKS, "is", " it", "<tag>", "<tag><b>"])).map("".join), min_size=1
)
SPOKEN = ["What is it? It isn't his, they've 1234 of them.\n\n\tYes  \n no", "naïve 中文 <tag><b> x<tag>", "", "<|im_end|>"]


def tokenizer(name="gpt-2", *, normalizer=None, added=("<tag>", "<tag><b>", "<|im_end|>"), normalized=False, **named):
    backend = Tokenizer(models.BPE(**named))
    backend.pre_tokenizer = KNOWN[name]
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(SPOKEN * 3, trainer)
    backend.add_tokens([AddedToken(token, normalized=normalized) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


MADE = {name: tokenizer(name, normalizer=normalizers.NFC() if name == "qwen2" else None) for name in KNOWN}


def same(words, made, texts):
    """Check ids and sizes against the backend's."""
    ids, sizes, _ = words.encode(texts)
    expected = [each.ids for each in made.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]
    assert ids.tolist() == [token for ids in expected for token in ids]
    assert sizes == [len(ids) for ids in expected]


@pytest.mark.parametrize("name", KNOWN)
@given(batches=st.lists(TEXTS, min_size=1, max_size=3))
def test_as_the_tokenizer(name, batches):
    """Any texts, batch by batch, with tokens within tokens, half characters and text that a normalizer changes."""
    words = word_cache(MADE[name])
    for texts in [*batches, SPOKEN, *batches]:
        same(words, MADE[name], texts)


def test_a_normalized_token():
    """GPT-2's own kind of added token, where no normalizer changes a text."""
    made = tokenizer(normalized=True)
    same(word_cache(made), made, ["a<tag><b> it", *SPOKEN])


def test_merges_are_passed_over():
    """Llama-3 takes a word that is in the vocabulary as one token."""
    made = tokenizer("llama-3", ignore_merges=True)
    same(word_cache(made), made, SPOKEN)


@pytest.mark.parametrize("limit", ["_MAX_WORDS", "_MAX_CHARACTERS"])
def test_what_is_remembered_is_bounded(monkeypatch, limit):
    """Beyond the limit everything is forgotten, and tokenised again."""
    monkeypatch.setattr(_word_cache, limit, 20)
    made = MADE["gpt-2"]
    words = word_cache(made)
    for number in range(5):
        same(words, made, [*SPOKEN, f"word{number} other{number}"])
    _, _, new = words.encode(["What it is"])
    assert "What" in new.texts


def test_what_repeats_nothing_is_noticed(monkeypatch):
    """Where most words are new, whole texts are tokenised from then on; the ids stay right."""
    monkeypatch.setattr(_word_cache, "_MIN_SAMPLE", 100)
    draw = random.Random(0)
    texts = [" ".join("".join(draw.choices(string.ascii_letters, k=8)) for _ in range(200)) for _ in range(3)]
    tokenize = BatchTokenizer(MADE["gpt-2"])
    assert tokenize.uses_cache
    for _ in range(2):
        ids, _, sizes = tokenize(texts, special=False)
        assert not tokenize.uses_cache
        expected = [MADE["gpt-2"].backend_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        assert ids.tolist() == [token for each in expected for token in each]
        assert sizes == [len(each) for each in expected]


def test_a_wrong_cut_is_noticed():
    """A cutter that disagrees with its tokenizer is noticed, and nothing of the cache is used."""
    tokenize = BatchTokenizer(MADE["gpt-2"])
    tokenize._words._cut = list
    made = tokenize(SPOKEN, special=False)
    expected = tokenize._by_tokenizer(SPOKEN, special=False)
    assert [made.ids.tolist(), made.offsets.tolist(), made.sizes] == [
        expected.ids.tolist(),
        expected.offsets.tolist(),
        expected.sizes,
    ]
    assert not tokenize.uses_cache


def test_who_is_told_word_by_word():
    """Byte-level families with a known expression use the cache, unless a special token takes blanks along."""
    message = {name for name, family in FAMILIES.items() if BatchTokenizer(family.tokenizer()).uses_cache}
    assert message == {
        name for name, family in FAMILIES.items() if family.make in ("bytes", "tiktoken") and not family.swallows
    }


def test_chance_and_letters_are_left_to_the_tokenizer():
    """Random merges, special tokens read as letters, and another model have no cache."""
    spelled = tokenizer()
    spelled.split_special_tokens = True
    assert word_cache(tokenizer(dropout=0.1)) is None
    assert word_cache(spelled) is None
    other = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    other.pre_tokenizer = KNOWN["gpt-2"]
    assert word_cache(PreTrainedTokenizerFast(tokenizer_object=other)) is None
