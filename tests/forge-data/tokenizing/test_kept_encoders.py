"""An encoder is kept between calls as long as its tokenizer is the same, and no longer."""

import threading

import pytest
from tokenizers import AddedToken

from forge_data import TemplateError, add_tokens, tokenize
from forge_data._options import Options
from forge_data.tokenizing._encoder import Encoder
from forge_data.tokenizing._kept_encoders import _MOST, kept_encoder

from ..conftest import FAMILIES

ROW = {"messages": [{"role": "user", "content": "hi <tool>"}, {"role": "assistant", "content": "ho"}]}


def fresh(tokenizer):
    """What an encoder that was made just now makes of the row."""
    from forge_data.formats._registry import convert

    encoder = Encoder(tokenizer)
    (encoded,) = encoder.encode([convert("messages", "row", ROW, encoder.vocabulary)])
    return encoded.examples[0]


def same(example, other):
    """Whether two examples have the same ids, labels and segments."""
    return (
        example.input_ids.tolist() == other.input_ids.tolist()
        and example.labels.tolist() == other.labels.tolist()
        and example.roles == other.roles
    )


def test_the_next_call_finds_it():
    """One encoder serves all calls with a tokenizer and what it learns on; another tokenizer has its own."""
    tokenizer, other = (FAMILIES["chatml"].tokenizer() for _ in range(2))
    encoder = kept_encoder(tokenizer, Options())
    assert kept_encoder(tokenizer, Options()) is encoder
    assert kept_encoder(tokenizer, Options(train_on="all")) is not encoder
    assert kept_encoder(other, Options()) is not encoder


def template(tokenizer):
    tokenizer.chat_template = FAMILIES["generation marks"].template


def added(tokenizer):
    add_tokens(tokenizer, ["<tool>"])


def special(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<tool>", special=True)]})


def eos(tokenizer):
    tokenizer.eos_token = "<|endoftext|>"


@pytest.mark.parametrize("change", [template, added, special, eos])
def test_a_change_is_noticed(change):
    """A template, tokens and special tokens that change in place change what the next call makes, as with a new encoder."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    before = tokenize(ROW, tokenizer)
    assert all(same(tokenize(ROW, tokenizer), before) for _ in range(4))
    encoder = kept_encoder(tokenizer, Options())
    assert encoder.encode_known(ROW["messages"]) is not None
    change(tokenizer)
    assert kept_encoder(tokenizer, Options()) is not encoder
    assert same(tokenize(ROW, tokenizer), fresh(tokenizer))
    assert not same(tokenize(ROW, tokenizer), before) or change is eos


def test_a_template_that_is_taken_away_is_missed():
    """An error of the changed tokenizer is raised, and the former template works again when it is put back."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    before, template = tokenize(ROW, tokenizer), tokenizer.chat_template
    tokenizer.chat_template = None
    with pytest.raises(TemplateError):
        tokenize(ROW, tokenizer)
    tokenizer.chat_template = template
    assert same(tokenize(ROW, tokenizer), before)


def test_few_are_kept():
    """A program that loads many tokenizers does not hold all of them."""
    tokenizers = [FAMILIES["chatml"].tokenizer() for _ in range(_MOST + 1)]
    first, *_ = [kept_encoder(tokenizer, Options()) for tokenizer in tokenizers]
    assert kept_encoder(tokenizers[0], Options()) is not first
    assert kept_encoder(tokenizers[-1], Options()) is kept_encoder(tokenizers[-1], Options())


def test_threads_have_their_own():
    """Two threads never share an encoder."""
    tokenizer, found = FAMILIES["chatml"].tokenizer(), []
    thread = threading.Thread(target=lambda: found.append(kept_encoder(tokenizer, Options())))
    thread.start()
    thread.join()
    assert found[0] is not kept_encoder(tokenizer, Options())
