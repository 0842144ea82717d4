"""Texts that are told word by word get the ids that the tokenizer gives them."""

import random
import string

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from forge_data.tokenizing import _word_cache as _words
from forge_data.tokenizing._encoder import Encoder
from forge_data.tokenizing._word_cache import words_of

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
    """The words' ids and sizes are the backend's."""
    told, _ = words.of(texts)
    expected = [each.ids for each in made.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]
    assert told.ids.tolist() == [token for ids in expected for token in ids]
    assert told.sizes == [len(ids) for ids in expected]


@pytest.mark.parametrize("name", KNOWN)
@given(batches=st.lists(TEXTS, min_size=1, max_size=3))
def test_as_the_tokenizer(name, batches):
    """Any texts, batch by batch, with tokens within tokens, half characters and texts that a normalizer changes."""
    words = words_of(MADE[name])
    for texts in [*batches, SPOKEN, *batches]:
        same(words, MADE[name], texts)


def test_a_normalized_token():
    """GPT-2's own kind of added token, where no normalizer changes a text."""
    made = tokenizer(normalized=True)
    same(words_of(made), made, ["a<tag><b> it", *SPOKEN])


def test_merges_are_passed_over():
    """Llama-3 takes a word that is in the vocabulary as it is."""
    made = tokenizer("llama-3", ignore_merges=True)
    same(words_of(made), made, SPOKEN)


@pytest.mark.parametrize("limit", ["_MOST_PIECES", "_MOST_CHARACTERS"])
def test_what_is_remembered_is_bounded(monkeypatch, limit):
    """Beyond the limit all is forgotten, and asked for again."""
    monkeypatch.setattr(_words, limit, 20)
    made = MADE["gpt-2"]
    words = words_of(made)
    for number in range(5):
        same(words, made, [*SPOKEN, f"word{number} other{number}"])
    _, new = words.of(["What it is"])
    assert "What" in new.texts


def test_what_repeats_nothing_is_noticed(monkeypatch):
    """Where most pieces are new, the tokenizer is asked for whole texts from then on; the ids stay right."""
    monkeypatch.setattr(_words, "_TELLING", 100)
    draw = random.Random(0)
    texts = [" ".join("".join(draw.choices(string.ascii_letters, k=8)) for _ in range(200)) for _ in range(3)]
    bytes_ = Encoder(MADE["gpt-2"])._bytes
    assert bytes_.by_words
    for _ in range(2):
        ids, _, sizes = bytes_.of(texts)
        assert not bytes_.by_words
        expected = [MADE["gpt-2"].backend_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        assert ids.tolist() == [token for each in expected for token in each]
        assert sizes == [len(each) for each in expected]


def test_a_wrong_cut_is_noticed():
    """A tokenizer that cuts otherwise than it says is asked for whole texts, and nothing of what was looked up is used."""
    bytes_ = Encoder(MADE["gpt-2"])._bytes
    bytes_._words._cut = list
    ids, places, sizes = bytes_.of(SPOKEN)
    told = bytes_._told(SPOKEN)
    assert [ids.tolist(), places.tolist(), sizes] == [told[0].tolist(), told[1].tolist(), told[2]]
    assert not bytes_.by_words


def test_who_is_told_word_by_word():
    """Families whose expression is known; not those of another make, nor those of which a special token takes blanks along."""
    told = {name for name, family in FAMILIES.items() if Encoder(family.tokenizer())._bytes.by_words}
    assert told == {name for name, family in FAMILIES.items() if family.make in ("bytes", "tiktoken") and not family.swallows}


def test_chance_and_letters_are_left_to_the_tokenizer():
    """Merges that are left out by chance, special tokens that are to be read as letters, another model."""
    spelled = tokenizer()
    spelled.split_special_tokens = True
    assert words_of(tokenizer(dropout=0.1)) is None
    assert words_of(spelled) is None
    other = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    other.pre_tokenizer = KNOWN["gpt-2"]
    assert words_of(PreTrainedTokenizerFast(tokenizer_object=other)) is None
