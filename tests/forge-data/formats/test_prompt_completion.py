"""Prompt and completion, as text or as messages."""

import pytest

from forge_data import DataError
from forge_data.formats._prompt_completion import prompt_completion, unpaired
from forge_data.formats._samples import Chat, Text

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def test_text():
    """Strings are text, also where they look like something else."""
    assert prompt_completion("f:1", {"prompt": "", "completion": '[{"role": "user"}]'}) == Text("f:1", "", '[{"role": "user"}]')


def test_messages():
    """Messages of both are one conversation; learning begins with the completion, whatever either side contains."""
    assert prompt_completion("f:1", {"prompt": [USER], "completion": [BOT]}) == Chat("f:1", [USER, BOT], 1)
    assert prompt_completion("f:1", {"prompt": [], "completion": [USER, BOT]}) == Chat("f:1", [USER, BOT], 0)
    made = prompt_completion("f:1", {"prompt": [USER, BOT, USER], "completion": [BOT | {"train": False}, USER, BOT]})
    assert (made.first_completion, made.trains) == (3, (True, True, True, False, True, True))


@pytest.mark.parametrize(
    ("prompt", "columns", "expected", "places", "fields"),
    [
        ("a<image>b<image>", {"images": ["x", "y"]}, "ab", (1, 2), ["images[0]", "images[1]"]),
        ("ab", {"image": "x"}, "ab", (0,), ["image"]),
        ("a<audio>b", {"images": ["x", "y"], "audio": "z"}, "ab", (0, 0, 1), ["images[0]", "images[1]", "audio"]),
        ("<audio><image>", {"image": "x", "audio": "z"}, "", (0, 0), ["audio", "image"]),
        ("a<image>b", {"images": []}, "a<image>b", (), []),
    ],
)
def test_media_of_a_text(prompt, columns, expected, places, fields):
    """Each medium stands where its mark does; without a mark of their kind all stand before the prompt."""
    made = prompt_completion("f:1", {"prompt": prompt, "completion": "c", **columns})
    assert (made.prompt, made.completion, made.places) == (expected, "c", places)
    assert [medium.field for medium in made.media] == fields


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"prompt": "<image>", "completion": "c", "images": ["x", "y"]},
            "f:1: field images holds 2 images, and <image> stands in the prompt 1 time; give each image its place",
        ),
        ({"prompt": "a", "completion": "<image>", "image": "x"}, "f:1: field completion holds <image>, and the row has images"),
        ({"prompt": "a", "completion": [BOT]}, "f:1: prompt is the string 'a' and completion is a list of 1; make both"),
        ({"prompt": [USER], "completion": "b"}, "f:1: prompt is a list of 1 and completion is the string 'b'; make both"),
        ({"prompt": 1, "completion": 2}, "f:1: prompt is int 1 and completion is int 2; make both"),
        ({"prompt": "a", "completion": "\ud800"}, "f:1: field completion holds the lone surrogate"),
        (
            {"prompt": "a", "completion": "b", "tools": [{}]},
            "f:1: field tools is a list of 1, but prompt and completion are text",
        ),
        ({"prompt": [USER], "completion": []}, "f:1: field completion is an empty list"),
    ],
)
def test_refused(row, expected):
    """A row of two types, or of neither, is refused with both."""
    with pytest.raises(DataError, match=expected):
        prompt_completion("f:1", row)


@pytest.mark.parametrize(
    ("label", "wanted"), [(True, True), (False, False), ("True", True), ("false", False), (1, True), (0, False)]
)
def test_labels(label, wanted):
    """A label is true or false, as JSON, a table or a CSV file writes them."""
    made = unpaired("f:1", {"prompt": "a", "completion": "b", "label": label})
    assert (made.desirable, made.answer) == (wanted, Text("f:1", "a", "b"))


@pytest.mark.parametrize("label", ["yes", 2, -1, 1.0, 0.5, [True], ""])
def test_no_label(label):
    """Anything else is refused and not guessed at."""
    with pytest.raises(DataError, match="f:1: field label is .*; it must be true"):
        unpaired("f:1", {"prompt": "a", "completion": "b", "label": label})
