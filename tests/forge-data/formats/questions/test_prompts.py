"""A row → question."""

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_data import DataError
from forge_data.formats._samples import Chat
from forge_data.formats.questions._prompts import question
from forge_data.formats.questions._texts import labelled

USER, BOT, TOOL = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "tool", "content": "4"}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1, max_size=5), json_values, max_size=4))
def test_columns_come_back_as_they_were(columns):
    """Any JSON value is kept exactly: floats, large numbers, nulls within, half surrogates, the order of keys."""
    read = ("prompt", "messages", "tools", "image", "video", "audio")
    columns = {name: value for name, value in columns.items() if name not in read}
    record = json.loads(question("f:1", {"prompt": "a", **columns}).record)
    assert record["prompt"] == "a"
    assert repr(record["columns"]) == repr(columns)
    assert list(record["columns"]) == list(columns)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, 0.1 + 0.2, -0.0, "\ud800", True])
def test_odd_values(value):
    """What tables hold beyond JSON's numbers is kept too, each with its type."""
    back = json.loads(question("f:1", {"prompt": "a", "x": value}).record)["columns"]["x"]
    assert repr(back) == repr(value)


@pytest.mark.parametrize("value", [b"a", np.float32(1), (1, 2), [np.int64(3)], {"a": {1: 2}}, {"b": [set()]}])
def test_what_is_no_json(value):
    """A value that would come back changed is refused by its place."""
    with pytest.raises(DataError, match=r"f:1: field x[\w.\[\]]* (is|has)"):
        question("f:1", {"prompt": "a", "x": value})


def test_too_deep():
    """A value that is nested too deeply to be read again is refused; a deep one is kept."""
    deep = json.loads("[" * 150 + "]" * 150)
    assert json.loads(question("f:1", {"prompt": "a", "x": deep}).record)["columns"]["x"] == deep
    with pytest.raises(DataError, match=r"f:1: field x\[0\]\[0\].* more than 200 deep"):
        question("f:1", {"prompt": "a", "x": json.loads("[" * 900 + "]" * 900)})


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("prompt", [[USER], "hi", [{"role": "system", "content": "Be long."}, USER]])
@pytest.mark.parametrize("system", ["Be brief.", {"role": "system"}, np.array(["a"])])
def test_a_system_prompt_that_is_not_asked_with(prompt, system):
    """A field of its own would go to rewards alone; it is refused, and renamed where that is meant."""
    with pytest.raises(DataError, match=r"f:1: field system is .*, which the model would not be asked with; .*system=note"):
        question("f:1", {"prompt": prompt, "system": system})
    with pytest.raises(DataError, match="which the model would not be asked with"):
        question("f:1", {"messages": json.dumps([USER]), "system": system})


@pytest.mark.parametrize("prompt", [[SYSTEM, USER], [{**SYSTEM, "role": "developer"}, USER], "Be brief. Hi!"])
def test_a_system_prompt_that_is_asked_with(prompt):
    """Where the prompt begins with it, it is a further field; so is one that says nothing, a flag or a number."""
    for system in ("Be brief.", " Be brief.\n", "", None, True, 3, float("nan")):
        assert json.loads(question("f:1", {"prompt": prompt, "system": system}).record)["columns"].keys() == {"system"}
    assert question("f:1", {"messages": json.dumps([SYSTEM, USER]), "system": "Be brief."})


def test_messages():
    """A conversation that ends before an answer is kept with its template fields; parts become text."""
    for fields in ({"messages": [USER]}, {"prompt": [USER]}, {"messages": json.dumps([USER])}, {"messages": [USER, BOT, TOOL]}):
        assert isinstance(question("f:1", fields).prompt, Chat)
    asked = question(
        "f:1", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [{"name": "f"}]}
    )
    assert asked.prompt.tools == [{"name": "f"}]
    assert json.loads(asked.record) == {"prompt": [{"role": "user", "content": "a"}], "columns": {"tools": [{"name": "f"}]}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": [USER, BOT]}, r"f:1: field messages\[1\] is of the role 'assistant', and a prompt ends where"),
        ({"prompt": [USER, {"role": "system", "content": "s"}]}, r"field prompt\[1\] is of the role 'system'"),
        ({"prompt": "a", "messages": [USER]}, "f:1 has the fields 'prompt', 'messages', which are two; keep one of them"),
        ({"text": "a"}, "f:1 has the fields 'text', and none of them is a prompt; give prompt"),
        ({"prompt": 3}, "field prompt is int 3; it must be a string"),
        ({"prompt": "a\ud800"}, "field prompt holds the lone surrogate"),
        ({"prompt": [{"role": "bot", "content": "x"}]}, r"field prompt\[0\].role is the string 'bot'"),
        ({"messages": []}, "field messages is an empty list"),
        ({"prompt": "a", "tools": [{"name": "f"}]}, "field tools is a list of 1, but the prompt is text, which no chat "
                                                    "template"),
        ({"prompt": [USER], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize is no argument"),
    ],
)  # fmt: skip
def test_refused(fields, expected):
    """A row without a prompt, or with two, is refused by row and field."""
    with pytest.raises(DataError, match=expected):
        question("f:1", fields)


@pytest.mark.parametrize(
    ("fields", "empty"),
    [
        ({"prompt": ""}, True),
        ({"prompt": " \n\u3000"}, True),
        ({"prompt": []}, True),
        ({"prompt": [{"role": "user", "content": ""}]}, True),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": ""}]}, False),
        ({"prompt": "."}, False),
    ],
)
def test_empty(fields, empty):
    """A prompt of blanks alone is empty; any other text is not."""
    assert question("f:1", fields).empty is empty


@pytest.mark.parametrize(
    "message",
    [
        USER | {"train": True},
        USER | {"train_detail": [{"begin_offset": 0, "end_offset": 0, "train": True}]},
        BOT | {"content": [{"type": "text", "text": "ho", "train": True}]},
    ],
)
def test_nothing_of_a_prompt_is_learned(message):
    """A message that asks to be learned is refused; one that is not to be learned says what holds anyway."""
    for read, name, more in ((question, "prompt", {}), (labelled, "messages", {"label": "a"})):
        with pytest.raises(DataError, match=rf"f:1: field {name}\[0\] asks to be learned .* no message is; take that out"):
            read("f:1", {name: [message, USER], **more})
        kept = read("f:1", {name: [USER | {"train": False}, BOT | {"train": True}, USER], **more})
        assert json.loads(kept.record)["prompt"] == [USER, BOT, USER]
