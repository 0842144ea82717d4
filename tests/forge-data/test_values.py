"""Values of a row: described in a message, checked as text, read from JSON strings."""

import pytest

from forge_data import DataError
from forge_data._values import checked_text, checked_tree, describe, from_json


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
    """Each type of value is described, and long ones are cut."""
    assert describe(value) == words


def test_unicode():
    """Text beyond ASCII is accepted, of any plane; half of a character is not."""
    assert checked_text("f:1", "prompt", "é🙂\u200b\x00") == "é🙂\u200b\x00"
    with pytest.raises(DataError, match=r"f:1: field prompt holds the lone surrogate U\+DFFF at position 2"):
        checked_text("f:1", "prompt", "é.\udfff")


def test_trees():
    """Every string of a value is checked, and named by its path."""
    tree = {"a": [1, None, {"b": "é"}]}
    assert checked_tree("f:1", "tools", tree) is tree
    with pytest.raises(DataError, match=r"f:1: field tools.a\[1\].b holds the lone surrogate"):
        checked_tree("f:1", "tools", {"a": [1, {"b": "\ud800"}]})


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("[1]", [1]), (' {"a": null}', {"a": None}), ("[", "["), ("hi", "hi"), ("3", "3"), ("", ""), (3, 3), (None, None),
        ('{"a": 1, "a": 1}', '{"a": 1, "a": 1}'), ("[NaN]", "[NaN]"), ("[" * 100_000, "[" * 100_000), ("[1] x", "[1] x"),
    ],
)  # fmt: skip
def test_from_json(value, read):
    """A list or an object in a string is decoded; anything else, or invalid JSON, is returned as it is."""
    assert from_json(value) == read
