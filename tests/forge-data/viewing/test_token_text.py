"""Ids → text of each token."""

import itertools

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from forge_data.viewing._token_text import Piece, TokenTexts, characters

from ..conftest import CORPUS

NASTY = ["Zürich", "日本の首都", "👩‍👩‍👧 مرحبا", "a  b\t\n c", "<|im_end|> in text", "\x00\x1b[31m", "é e\u0301 \u200b"]


def wrapped(backend, **names):
    backend.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)


def sentencepiece():
    """A tokenizer as Llama-2's: ▁ for a blank, bytes as <0x0A> where the vocabulary has no letter."""
    letters = sorted({letter for line in CORPUS for letter in line if letter.isascii() and letter not in " \n"})
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for token in ["▁", *letters, "▁t", "he", "▁the"]:
        vocabulary.setdefault(token, len(vocabulary))
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "t"), ("h", "e"), ("▁t", "he")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrapped(backend)


def metaspace():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.train_from_iterator([*CORPUS, *NASTY], trainers.BpeTrainer(vocab_size=500, show_progress=False))
    return wrapped(backend)


def wordpiece():
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    )
    return wrapped(backend, unk_token="[UNK]")


def words_with_suffix():
    backend = Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["[UNK]"], end_of_word_suffix="</w>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend, unk_token="[UNK]")


def text_of(tokenizer, ids):
    return b"".join(piece.data for piece in TokenTexts(tokenizer).of(ids)).decode("utf-8", "surrogateescape")


@given(text=st.text(max_size=40) | st.sampled_from(NASTY))
def test_byte_level(tokenizers, text):
    """Tokens of a byte-level vocabulary are together what the tokenizer decodes, every byte of it."""
    tokenizer = tokenizers["chatml", True]
    ids = tokenizer(text.encode("utf-8", "replace").decode(), add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("make", [sentencepiece, metaspace])
def test_blanks_that_are_letters(make, text):
    """▁ is a blank and <0x0A> a byte, as the tokenizer decodes them."""
    tokenizer = make()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [wordpiece, words_with_suffix])
def test_whole_words(make):
    """Vocabularies of whole words get the blanks between them that the tokenizer adds."""
    tokenizer = make()
    ids = tokenizer("What is the capital of France? The answer", add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids).rstrip() == tokenizer.decode(ids)


def test_special_tokens_are_one_thing(chatml_tokenizer):
    """An added token is special; the same letters spelled out are not."""
    special = chatml_tokenizer.convert_tokens_to_ids("<|im_end|>")
    spelled = [chatml_tokenizer.convert_tokens_to_ids(letter) for letter in "<|im_end|>"]
    message = TokenTexts(chatml_tokenizer).of([special, *spelled])
    assert message[0] == Piece(b"<|im_end|>", special=True)
    assert not any(piece.special for piece in message[1:])
    assert b"".join(piece.data for piece in message[1:]) == b"<|im_end|>"


def test_added_blanks_are_text():
    """A run of blanks that is an added token is text and no special token."""
    tokenizer = metaspace()
    tokenizer.add_tokens(["    "])
    assert TokenTexts(tokenizer).of([tokenizer.convert_tokens_to_ids("    ")]) == [Piece(b"    ")]


def test_ids_that_say_nothing(chatml_tokenizer):
    """Without a tokenizer, and for an unknown id, the number itself is shown."""
    assert TokenTexts(None).of([7]) == [Piece(b"[7]", special=True)]
    assert TokenTexts(chatml_tokenizer).of([10**6]) == [Piece(b"[1000000]", special=True)]


@given(text=st.text(), cuts=st.lists(st.integers(0, 60)))
def test_characters_are_never_lost(text, cuts):
    """However UTF-8 is cut into tokens, their characters are the text, each whole in the token that begins it."""
    data = text.encode("utf-8", "replace")
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [Piece(data[a:b]) for a, b in itertools.pairwise(edges)]
    texts, inside = characters(pieces)
    assert "".join(texts) == data.decode()
    for piece, shown, within in zip(pieces, texts, inside, strict=True):
        assert within == (piece.data[:1] != b"" and 0x80 <= piece.data[0] < 0xC0)
        assert shown or within


@given(parts=st.lists(st.tuples(st.binary(max_size=5), st.booleans()), max_size=8))
def test_any_bytes_are_shown(parts):
    """Any bytes are shown once: as characters, or as bytes, and never across a special token."""
    pieces = [Piece(data.decode("latin-1").encode(), special) if special else Piece(data) for data, special in parts]
    texts, inside = characters(pieces)
    assert "".join(texts).encode("utf-8", "surrogateescape") == b"".join(piece.data for piece in pieces)
    assert not any(within and piece.special for piece, within in zip(pieces, inside, strict=True))


def test_a_character_that_breaks_off():
    """An incomplete character before a letter stays as bytes in its tokens, and none is inside a character."""
    texts, inside = characters([Piece(b"a\xe2"), Piece(b"\x82"), Piece(b"b")])
    assert texts == ["a\udce2", "\udc82", "b"]
    assert inside == [False, False, False]
