"""Values in few words."""

import pytest

from forge_data._values import describe


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (False, "false"),
        ("x" * 50, "the string '" + "x" * 40 + "…'"),
        ({"a": 1, "b": 2}, "an object with 'a', 'b'"),
        ({}, "an object with no fields"),
        ([1], "a list of 1"),
        (1.5, "float 1.5"),
    ],
)
def test_words(value, words):
    """Each kind of value has its words, and long ones are cut."""
    assert describe(value) == words
