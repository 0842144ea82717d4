"""Messages are checked field by field."""

import pytest

from forge_data import DataError
from forge_data._messages import checked_messages, checked_text

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("hi", r"f:3: field messages is the string 'hi'; it must be a list of messages"),
        ([], r"f:3: field messages is an empty list"),
        ([USER, "hi"], r"f:3: field messages\[1\] is the string 'hi'; it must be \{"),
        ([{"content": "hi"}], r"f:3: field messages\[0\] is an object with 'content' and lacks a role; allowed: system"),
        ([USER, USER, {"role": "Assistant", "content": "x"}],
         r"f:3: field messages\[2\].role is the string 'Assistant'; allowed: system, developer, user, assistant, tool"),
        ([{"role": 1, "content": "x"}], r"f:3: field messages\[0\].role is int 1; allowed"),
        ([{"role": ["user"], "content": "x"}], r"f:3: field messages\[0\].role is a list of 1; allowed"),
        ([{"role": "user"}], r"f:3: field messages\[0\].content is null; it must be a string"),
        ([{"role": "user", "content": None}], r"f:3: field messages\[0\].content is null; it must be a string"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], r"messages\[0\].content is a list of 1; it must be a string"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], r"messages\[0\].tool_calls is a list of 1, which is not supp"),
        ([{"role": "assistant", "content": "x", "reasoning_content": "y"}], r"messages\[0\].reasoning_content is the string 'y', which"),
        ([{"role": "assistant", "content": "x", "train": False}], r"messages\[0\].train is false, which is not supported"),
        ([{"role": "user", "content": "a\ud800b"}], r"messages\[0\].content holds the lone surrogate U\+D800 at position 1"),
    ],
)  # fmt: skip
def test_refused(value, said):
    """What is wrong is named by place and field, with what was found and what is allowed."""
    with pytest.raises(DataError, match=said):
        checked_messages("f:3", "messages", value)


def test_null_fields_are_absent():
    """Parquet gives every message every field; those that are null are not there."""
    assert checked_messages("f:1", "messages", [USER | {"name": None, "tool_calls": None}]) == [USER]


def test_an_empty_prompt():
    """A prompt of no messages may stand before a completion that brings its own."""
    assert checked_messages("f:1", "prompt", []) == []
    with pytest.raises(DataError, match="field completion is an empty list"):
        checked_messages("f:1", "completion", [])


def test_unicode():
    """Text beyond ASCII is fine, of any plane."""
    assert checked_text("f:1", "prompt", "é🙂\u200b\x00") == "é🙂\u200b\x00"
