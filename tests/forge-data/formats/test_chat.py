"""What a row gives its chat template beside the messages."""

import pytest

from forge_data import DataError
from forge_data.formats._chat import chat
from forge_data.formats._messages import Turns

TURNS = Turns([{"role": "user", "content": "hi"}], (True,))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}


def test_all_of_it():
    """Tools, documents, template arguments and unmask are kept as the row has them."""
    row = {"tools": [TOOL], "documents": [{"title": "a"}], "chat_template_kwargs": {"enable_thinking": False}, "unmask": True}
    made = chat("f:1", row, TURNS, 1)
    assert (made.messages, made.trains, made.weights, made.first_completion) == (*TURNS[:3], 1)
    assert (made.tools, made.documents, made.template_kwargs, made.unmask) == (*(row[name] for name in list(row)[:3]), True)


def test_as_json():
    """A table keeps tools as text, all of them or each; the text is decoded."""
    for tools in ('[{"name": "f", "x": null}]', ['{"name": "f", "x": null}']):
        assert chat("f:1", {"tools": tools}, TURNS).tools == [{"name": "f", "x": None}]
    assert chat("f:1", {"chat_template_kwargs": '{"a": 1}'}, TURNS).template_kwargs == {"a": 1}


@pytest.mark.parametrize("empty", [None, [], "", {}])
def test_empty(empty):
    """Empty values are not passed to the template: an empty list of tools is no tools."""
    made = chat("f:1", dict.fromkeys(("tools", "documents", "chat_template_kwargs"), empty) | {"unmask": False}, TURNS)
    assert (made.tools, made.documents, made.template_kwargs, made.unmask) == (None, None, {}, False)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"tools": "f"}, "f:1: field tools is the string 'f'; it must be a list of objects"),
        ({"tools": [TOOL, "f"]}, r"f:1: field tools\[1\] is the string 'f'; it must be an object"),
        ({"tools": [{"name": "\ud800"}]}, r"f:1: field tools\[0\].name holds the lone surrogate"),
        ({"documents": {"a": 1}}, "f:1: field documents is an object with 'a'; it must be a list of objects"),
        ({"unmask": "false"}, "f:1: field unmask is the string 'false'; it must be true or false"),
        ({"unmask": 1}, "f:1: field unmask is int 1; it must be true or false"),
        ({"chat_template_kwargs": [1]}, "f:1: field chat_template_kwargs is a list of 1; it must be an object of template"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": True}},
            "field chat_template_kwargs.add_generation_prompt is no argument",
        ),
    ],
)
def test_refused(row, expected):
    """A value of another type is refused by its field."""
    with pytest.raises(DataError, match=expected):
        chat("f:1", row, TURNS)
