"""Alpaca rows are conversations of one question."""

import pytest

from forge_data import DataError
from forge_data.formats._alpaca import alpaca


def turns(made):
    return [(message["role"], message["content"]) for message in made.messages]


@pytest.mark.parametrize(
    ("instruction", "more", "asked"),
    [("Add.", "1 and 2", "Add.\n\n1 and 2"), ("Add.", "", "Add."), ("", "1 and 2", "1 and 2"), (" a ", " b ", " a \n\n b ")],
)
def test_question(instruction, more, asked):
    """The input comes an empty line below the instruction, and nothing is stripped."""
    made = alpaca("f:1", {"instruction": instruction, "input": more, "output": "3"})
    assert turns(made) == [("user", asked), ("assistant", "3")]
    assert made.first_completion == 1


def test_without_input():
    """The input may be missing; a system prompt may be there."""
    made = alpaca("f:1", {"instruction": "Add.", "output": "3", "system": "be brief"})
    assert turns(made) == [("system", "be brief"), ("user", "Add."), ("assistant", "3")]
    assert made.first_completion == 2


def test_history():
    """Earlier questions and answers come first; with them the row is a conversation whose answers are all learned."""
    made = alpaca("f:1", {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"})
    assert turns(made) == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert made.first_completion == 0


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"output": 3}, "f:1: field output is int 3; it must be a string"),
        ({"input": ["x"]}, "f:1: field input is a list of 1; it must be a string"),
        ({"system": {"a": 1}}, "f:1: field system is an object with 'a'; it must be a string"),
        ({"history": "a"}, r"f:1: field history is the string 'a'; it must be a list of \[question, answer\]"),
        ({"history": [["a"]]}, r"f:1: field history\[0\] is a list of 1; it must be \[question, answer\]"),
        ({"history": [["a", None]]}, r"f:1: field history\[0\]\[1\] is null; it must be a string"),
    ],
)
def test_refused(more, expected):
    """A value that is not text is named by its field."""
    with pytest.raises(DataError, match=expected):
        alpaca("f:1", {"instruction": "a", "output": "b"} | more)
