"""What is known of a conversation from others of its roles is what tracing it says, to the character."""

from functools import cache

import pytest
from hypothesis import given, strategies as st

from forge_data import TemplateError
from forge_data._errors import DataError
from forge_data.formats._samples import Chat
from forge_data.masking._conversation import Conversations
from forge_data.masking._span_cache import Skeletons
from forge_data.masking._train_on import learned

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
    """What a family's template makes of conversations, once it has seen some of all roles."""
    made = Conversations(FAMILIES[family].tokenizer())
    for roles in ROLES:
        for train_on in ("assistant", "last"):
            for said in ("a", "b c", "d\ne"):
                try:
                    read(made, chat(roles, [said] * len(roles)), train_on)
                except (DataError, TemplateError):
                    break
    return made


def chat(roles, said):
    return Chat("f:1", [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)])


def read(conversations, one, train_on):
    return conversations.read(one, learned(one, train_on), *conversations.texts([one]))


def outcome(conversations, one, train_on):
    try:
        return read(conversations, one, train_on)
    except (DataError, TemplateError) as error:
        return str(error)


@pytest.mark.parametrize("family", BLIND)
@given(said=SAID, roles=st.sampled_from(ROLES), train_on=st.sampled_from(["assistant", "last"]))
def test_as_traced(family, said, roles, train_on):
    """Text, spans, runs and notes are those of a conversation that is traced itself, whatever it says."""
    one = chat(roles, said)
    assert outcome(warm(family), one, train_on) == outcome(Conversations(FAMILIES[family].tokenizer()), one, train_on)


@pytest.mark.parametrize("family", BLIND)
def test_it_is_known(family, monkeypatch):
    """In every one of these families plain questions and answers are not traced again and again."""
    known = Conversations(FAMILIES[family].tokenizer())
    for said in ("a", "b"):
        read(known, chat(ROLES[1], [said] * 4), "assistant")
    monkeypatch.setattr(known._template, "write", None)
    assert read(known, chat(ROLES[1], ["what?", "that", "and?", "so"]), "assistant").spans


def test_a_template_that_looks_is_traced():
    """A template that writes other words for other contents is asked every time, though the text would fit."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content == 'yes' %}{{ 'yes' }}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    made = Conversations(tokenizer)
    for said in ("a", "b", "c"):
        read(made, chat(ROLES[0], [said, said]), "assistant")
    assert not made._skeletons._known


def test_another_text_is_traced():
    """Where the template writes another text than the skeleton says (the time of day), the skeleton says nothing."""
    found, one = Skeletons(), chat(ROLES[0], ["a", "b"])
    made = warm("chatml")
    (text,) = made.texts([one])
    what = learned(one, "assistant")
    assert made._skeletons.find(one, what, text) is not None
    assert made._skeletons.find(one, what, text + " ") is None
    assert found.find(one, what, text) is None


@pytest.mark.parametrize("said", ["", " a", "a\n", "\u3000a", "a\x1c"])
def test_outer_blanks_are_traced(said):
    """A content that a template may trim, or leave out, says nothing of others, nor they of it."""
    one = chat(ROLES[0], ["q", said])
    made = warm("chatml")
    assert made._skeletons.find(one, learned(one, "assistant"), *made.texts([one])) is None
    assert not made._skeletons.wanted(one, learned(one, "assistant"))
