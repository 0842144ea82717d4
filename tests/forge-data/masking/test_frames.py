"""Once the roles of a conversation are known its text is written without the template, and every array is the same."""

from contextlib import suppress
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st

from forge_data import DataError, TemplateError, tokenize
from forge_data._options import Options
from forge_data.formats._samples import Chat
from forge_data.tokenizing._encoder import Encoder
from forge_data.tokenizing._kept_encoders import kept_encoder

from ..families import FAMILIES
from ..nasty import BLANKS, LOOK_ALIKES, WORDS

TEXT = st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *WORDS, *BLANKS]), min_size=1, max_size=6).map("".join)
CLOCK = "{% set year = strftime_now('%Y') %}"
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def talk(*contents):
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def arrays(example):
    return example.input_ids.tolist(), example.labels.tolist(), example.segments.tolist(), example.roles, example.weights


@cache
def warm(family, train_on):
    """An encoder that has seen conversations of one and two questions."""
    encoder = Encoder(FAMILIES[family].tokenizer(), train_on)
    for _ in range(4):
        for messages in (talk("Who?", "Me."), talk("Who?", "Me.", "You?", "I.")):
            encoder.encode([Chat("f:1", messages)])
    return encoder


KNOWN = ["chatml", "qwen2.5", "llama-3", "llama-3.1", "phi-4", "zephyr", "smollm3", "mistral", "gemma-3", "vicuna"]


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"deepseek-r1-distill"}))
def test_families_are_known(family, train_on):
    """What most templates write of one question and answer is known by its roles, and of which ones is said here."""
    assert (warm(family, train_on).encode_known(talk("Why?", "So.")) is not None) >= (family in KNOWN)


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("family", KNOWN)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_contents(family, train_on, data):
    """Whatever contents say: ids, labels, segments and roles are those of an encoder that knows nothing."""
    messages = talk(*data.draw(st.lists(TEXT, min_size=2, max_size=2) | st.lists(TEXT, min_size=4, max_size=4)))
    found = warm(family, train_on).encode_known(messages)
    if found is not None:
        (encoded,) = Encoder(warm(family, train_on)._tokenizer, train_on).encode([Chat("f:1", messages)])
        assert arrays(found) == arrays(*encoded.examples)


def test_rows_that_are_not_plain_are_looked_at():
    """Other fields, contents that are no text or end with a blank, reasoning and unknown roles are left to the template."""
    encoder = warm("chatml", "assistant")
    assert encoder.encode_known(talk("a", "b")) is not None
    for messages in (
        talk("a", "b "),
        talk("", "b"),
        talk("a", "<think>x</think>b"),
        talk("a", None),
        talk("a", ["b"]),
        talk("\ud800", "b"),
        talk("a"),
        [{**talk("a")[0], "train": False}, talk("a", "b")[1]],
        [{"role": "user", "text": "a"}, talk("a", "b")[1]],
        [{"role": ["user"], "content": "a"}, talk("a", "b")[1]],
        ["a", "b"],
        [],
    ):
        assert encoder.encode_known(messages) is None


@pytest.mark.parametrize(
    "source", [CLOCK + TURNS, "{{ [1, 2] | random }}" + TURNS, "{% if 'no' in messages[0].content %}x{% endif %}"]
)
def test_what_is_not_repeated_is_not_known(with_template, source):
    """A template that reads the clock or draws is rendered each time; so is a content with a text that it looks for."""
    encoder = Encoder(with_template(source if TURNS in source else source + TURNS))
    for _ in range(4):
        # What draws may be refused for writing a conversation in two ways.
        with suppress(TemplateError):
            encoder.encode([Chat("f:1", talk("Who?", "Me."))])
    assert (encoder.encode_known(talk("yes", "b")) is not None) == ("'no'" in source)
    assert encoder.encode_known(talk("no", "b")) is None


def test_a_row_is_judged_as_before():
    """What is wrong with a row or an argument is said of a known row too; other arguments have their effect."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    row = {"messages": talk("Who are you?", "Me.")}
    first = tokenize(row, tokenizer)
    assert all(arrays(tokenize(row, tokenizer)) == arrays(first) for _ in range(4))
    assert kept_encoder(tokenizer, Options()).encode_known(row["messages"]) is not None
    assert arrays(tokenize(row, tokenizer, max_seq_len=len(first))) == arrays(first)
    assert (tokenize(row, tokenizer, train_on="all").labels != -100).all()
    assert tokenize(row | {"weight": 0.5}, tokenizer).weights is not None
    assert arrays(tokenize({"prompt": row["messages"][:1], "completion": row["messages"][1:]}, tokenizer)) == arrays(first)
    for more, message in (
        ({"max_seq_len": len(first) - 1}, "tokens, and `max_seq_len`"),
        ({"max_seq_len": 0}, "at least 1"),
        ({"max_seq_len": True}, "whole number"),
        ({"on_overflow": "cut"}, "`on_overflow` is 'cut'"),
        ({"train_on": ["assistant"]}, "`train_on` is"),
        ({"turns": "all"}, "`turns` is"),
        ({"format": "alpaca"}, "needs instruction"),
        ({"chat_template_kwargs": "x"}, "`chat_template_kwargs`"),
    ):
        with pytest.raises(DataError, match=message):
            tokenize(row, tokenizer, **more)
    with pytest.raises(DataError, match="field messages"):
        tokenize({"messages": talk("Who?", 7)}, tokenizer)
