"""Spans from the cache equal those of tracing the conversation, to the character."""

from functools import cache

import pytest
from hypothesis import given, strategies as st

from forge_data import TemplateError
from forge_data._errors import DataError
from forge_data.formats._samples import Chat
from forge_data.masking._conversation import ConversationReader
from forge_data.masking._span_cache import SpanCache
from forge_data.masking._train_on import learned_parts

from ..families import FAMILIES
from ..nasty import BLANKS, LOOK_ALIKES, WORDS

BLIND = (
    "chatml",
    "command-r",
    "gemma",
    "granite-3.3",
    "llama-3",
    "llama-3-generation",
    "mistral",
    "phi-3",
    "phi-4",
    "qwen2.5",
    "vicuna",
    "zephyr",
)
TEXT = st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *BLANKS]), min_size=1, max_size=4).map("".join)
SAID = st.lists(TEXT, min_size=4, max_size=4)
ROLES = [("user", "assistant"), ("user", "assistant", "user", "assistant"), ("system", "user", "assistant")]


@cache
def warm(family):
    """Return a reader that has seen conversations of all roles."""
    made = ConversationReader(FAMILIES[family].tokenizer())
    for roles in ROLES:
        for train_on in ("assistant", "last"):
            for expected in ("a", "b c", "d\ne"):
                try:
                    read(made, chat(roles, [expected] * len(roles)), train_on)
                except (DataError, TemplateError):
                    break
    return made


def chat(roles, expected):
    return Chat("f:1", [{"role": role, "content": text} for role, text in zip(roles, expected, strict=False)])


def read(conversations, one, train_on):
    return conversations.read(one, learned_parts(one, train_on), *conversations.render_batch([one]))


def outcome(conversations, one, train_on):
    try:
        return read(conversations, one, train_on)
    except (DataError, TemplateError) as error:
        return str(error)


@pytest.mark.parametrize("family", BLIND)
@given(expected=SAID, roles=st.sampled_from(ROLES), train_on=st.sampled_from(["assistant", "last"]))
def test_as_traced(family, expected, roles, train_on):
    """Text, spans, runs and notes are those of a conversation that is traced itself, whatever its contents."""
    one = chat(roles, expected)
    assert outcome(warm(family), one, train_on) == outcome(ConversationReader(FAMILIES[family].tokenizer()), one, train_on)


@pytest.mark.parametrize("family", BLIND)
def test_it_is_known(family, monkeypatch):
    """In each of these families plain questions and answers are traced once."""
    known = ConversationReader(FAMILIES[family].tokenizer())
    for expected in ("a", "b"):
        read(known, chat(ROLES[1], [expected] * 4), "assistant")
    monkeypatch.setattr(known._template, "render", None)
    assert read(known, chat(ROLES[1], ["what?", "that", "and?", "so"]), "assistant").spans


def test_a_template_that_looks_is_traced():
    """Conversations of a template that branches on content are always traced, even where the text would fit."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content == 'yes' %}{{ 'yes' }}{% else %}"
        "{{ m.content }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    made = ConversationReader(tokenizer)
    for expected in ("a", "b", "c"):
        read(made, chat(ROLES[0], [expected, expected]), "assistant")
    assert not made._cache._known


def test_another_text_is_traced():
    """Where the template writes another text than the layout (the time of day), the conversation is traced."""
    found, one = SpanCache(), chat(ROLES[0], ["a", "b"])
    made = warm("chatml")
    (text,) = made.render_batch([one])
    what = learned_parts(one, "assistant")
    assert made._cache.find(one, what, text) is not None
    assert made._cache.find(one, what, text + " ") is None
    assert found.find(one, what, text) is None


@pytest.mark.parametrize("expected", ["", " a", "a\n", "\u3000a", "a\x1c"])
def test_outer_blanks_are_traced(expected):
    """A content that a template may strip or leave out is traced, and gives no layout."""
    one = chat(ROLES[0], ["q", expected])
    made = warm("chatml")
    assert made._cache.find(one, learned_parts(one, "assistant"), *made.render_batch([one])) is None
    assert not made._cache.wanted(one, learned_parts(one, "assistant"))
