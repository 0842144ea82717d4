"""What `forge serve` says of the tokens of an answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forge.talking._served_logprobs import Logprobs

TEXT = "a \u4f60\U0001f34e\u4f60b"


def byte_level() -> Tokenizer:
    """A vocabulary of GPT-2's letters alone, one a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Tokenizer:
    """A vocabulary of SentencePiece: two letters, a space, and the bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
@pytest.mark.parametrize("left_out", [None, 3])
def test_a_part_of_a_character_has_its_bytes(made: Any, left_out: int | None) -> None:
    """Together they are the answer's, one at each token; a character that is broken off keeps what there is of it."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made())
    ids = tokenizer.encode(TEXT)
    data = TEXT.encode()
    assert len(ids) == len(data)  # no token is more than a byte
    if left_out is not None:  # the middle of the first long character
        del ids[left_out]
        data = data[:left_out] + data[left_out + 1 :]
    record = Logprobs(None, 2)
    for token in ids:
        record._logits = torch.zeros(len(tokenizer))
        record._logits[token] = 9.0
        record._add(token)
    content = record.of_messages(tokenizer, ())["content"]
    assert [bytes(each["bytes"]) for each in content] == [bytes([byte]) for byte in data]
    assert [each["top_logprobs"][0]["bytes"] for each in content] == [each["bytes"] for each in content]
    if left_out is None:
        assert "".join(each["token"] for each in content) == TEXT
        assert [each["token"] for each in content][:5] == ["a", " ", "", "", "\u4f60"]


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_parts_of_characters_have_names(made: Any) -> None:
    """OpenAI's, each its own: all of them stood under the empty text, the last of them alone."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made())
    record = Logprobs(None, 4)
    ids = tokenizer.encode("b\u4f60")
    for token in ids:
        record._logits = torch.full((len(tokenizer),), -50.0)
        record._logits[ids] = torch.tensor([1.0, 2.0, 3.0, 4.0])
        record._add(token)
    found = record.of_text(tokenizer, ())
    assert found["tokens"] == ["b", *(rf"bytes:\x{byte:02x}" for byte in "\u4f60".encode())]
    assert found["text_offset"] == [0, 1, 1, 1]
    for token, logprob, likeliest in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert set(likeliest.values()) == set(found["token_logprobs"])
        assert (likeliest[token], len(likeliest)) == (logprob, 4)
