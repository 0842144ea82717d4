"""ShareGPT rows are conversations like any other."""

import pytest

from forge_data import DataError
from forge_data.formats._sharegpt import sharegpt


def turn(speaker, value, **more):
    return {"from": speaker, "value": value} | more


def row(*turns, **more):
    return {"conversations": list(turns)} | more


def test_speakers():
    """Each speaker has its role; a function call is an assistant's tool call, an observation a tool's result."""
    call = '{"name": "add", "arguments": {"a": 1}}'
    made = sharegpt(
        "f:1",
        row(turn("system", "s"), turn("human", "h"), turn("function_call", call), turn("observation", "2"), turn("gpt", "g"))
        | {"tools": '[{"name": "add"}]'},
    )
    assert made.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "g"},
    ]
    assert made.tools == [{"name": "add"}]
    assert (made.first_completion, made.trains) == (0, None)


def test_several_calls():
    """A turn may call several functions, arguments as text or as they are."""
    calls = [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": {}}]
    message = sharegpt("f:1", row(turn("function_call", calls))).messages[0]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "g", "arguments": {}},
    ]


def test_a_system_prompt_of_its_own():
    """A row may keep the system prompt beside the turns; it becomes the first message."""
    made = sharegpt("f:1", row(turn("human", "h"), turn("gpt", "g", weight=0), system="be brief"))
    assert made.messages[0] == {"role": "system", "content": "be brief"}
    assert made.trains == (True, True, False)
    assert sharegpt("f:1", row(turn("human", "h"), system="")).messages == [{"role": "user", "content": "h"}]


def test_turns_of_role_and_content():
    """Some data sets keep OpenAI's messages under this name."""
    messages = [{"role": "user", "content": "h"}, {"role": "assistant", "content": "g"}]
    assert sharegpt("f:1", {"conversations": messages}).messages == messages


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (row(), "f:1: field conversations is an empty list; it must be a list of"),
        ({"conversations": "hi"}, "f:1: field conversations is the string 'hi'; it must be a list of"),
        (row("hi"), r"f:1: field conversations\[0\] is the string 'hi'; it must be"),
        (row({"value": "x"}), r"f:1: field conversations\[0\] is an object with 'value'; it must be"),
        (row(turn("narrator", "x")), r"f:1: field conversations\[0\].from is the string 'narrator'; allowed: system, human"),
        (row(turn("human", None)), r"f:1: field conversations\[0\].value is null; it must be a string"),
        (row(turn("human", "x", note="y")), r"f:1: field conversations\[0\].note is the string 'y', which would be passed "
                                            r"over.*; take it out"),
        (row({"from": "gpt", "text": "y"}), r"field conversations\[0\].text is .*; the turn has no value: if this is what "
                                            r"is said, rename it to value"),
        (row(turn("human", "x"), {"role": "user", "content": "x"}), r"f:1: field conversations\[1\] is an object with 'role', "
                                                                    r"'cont"),
        (row(turn("function_call", "add(1)")), r"f:1: field conversations\[0\].value is the string 'add\(1\)'; a function_call "
                                               r"is JSON"),
        (row(turn("function_call", "[]")), r"f:1: field conversations\[0\].value is .* a function_call is JSON"),
        (row(turn("function_call", '{"arguments": {}}')), r"f:1: field conversations\[0\].value.name is null; it must be a "
                                                          r"string"),
        (row(turn("gpt", "x", train="no")), r"f:1: field conversations\[0\].train is the string 'no'; it must be true or "
                                            r"false"),
        (row(turn("system", "x"), system="y"), "f:1: field system stands beside a system turn in the conversation"),
    ],
)  # fmt: skip
def test_refused(fields, expected):
    """A turn that cannot be read is named."""
    with pytest.raises(DataError, match=expected):
        sharegpt("f:1", fields)
