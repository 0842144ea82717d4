"""Trained as it will be asked: each learned turn stands behind the very prompt that the model will get for it.

The oracle knows nothing of tracing: what is asked is the messages before a turn with the generation prompt, what is to be learned
is what the template writes beyond that for the messages up to the turn.
"""

import logging
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from forge_data import DataError, TemplateError, prepare, tokenize
from forge_data.formats._samples import Chat, Preference
from forge_data.tokenizing._encoder import Encoder

from ..accounts import ACCOUNTS
from ..families import FAMILIES
from ..nasty import BLANKS, LOOK_ALIKES, WORDS

SWITCHES = ({}, *({name: value} for name, value in product(("enable_thinking", "thinking"), (False, True))))
EOS_AFTER = {"phi-3": "<|endoftext|>"}
"""What a template writes after the last turn's own end."""
TEXT = st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *BLANKS, *BLANKS]), max_size=6).map("".join)
REASONED = st.builds("<think>\n{}\n</think>\n\n{}".format, TEXT, TEXT)
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {}}}]


@cache
def tokenizer_of(family):
    return FAMILIES[family].tokenizer()


@cache
def encoder_of(family, turns="auto"):
    return Encoder(tokenizer_of(family), turns=turns)


def parts(tokenizer, example):
    """Return the text of an example's tokens in stretches: (text, is it learned)."""
    found = []
    for token_id, label in zip(example.input_ids.tolist(), example.labels.tolist(), strict=True):
        if not found or found[-1][1] != (label != -100):
            found.append(([], label != -100))
        found[-1][0].append(token_id)
    return [(ids, learned) for ids, learned in found]


def asked(family, messages, index, tools=None):
    """Yield prompt and answer of a turn as ids, under every argument that may have been chosen for it."""
    tokenizer = tokenizer_of(family)
    for switch in SWITCHES:
        given = {"tools": tools, "tokenize": False, **switch}
        prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, **given)
        answered = tokenizer.apply_chat_template(messages[: index + 1], **given)
        if answered.startswith(prompt):
            yield prompt, answered.removesuffix(EOS_AFTER.get(family, "")).rstrip()


def as_asked(family, messages, tools=None):
    """Check the samples of a conversation against the oracle; return how many there are."""
    tokenizer = tokenizer_of(family)
    (encoded,) = encoder_of(family).encode([Chat("f:1", messages, tools=tools)])
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = []
    for example in encoded.examples:
        at, ids = 0, example.input_ids.tolist()
        for stretch, learned in parts(tokenizer, example):
            if learned:
                turns.append((ids[:at], stretch))
            at += len(stretch)
    assert len(turns) == len(answers)
    for index, (context, learned) in zip(answers, turns, strict=True):
        wanted = []
        for prompt, answered in asked(family, messages, index, tools):
            whole = tokenizer(answered, add_special_tokens=False)["input_ids"]
            before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            wanted.append((before, whole[len(before) :]) if whole[: len(before)] == before else (None, whole))
        assert any(
            context + learned == (before or []) + rest if before is None else (context, learned) == (before, rest)
            for before, rest in wanted
        ), (tokenizer.decode(context), tokenizer.decode(learned))
    return len(encoded.examples)
