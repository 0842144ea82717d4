"""Tool calls: arguments become what templates read, and no field is ignored."""

import pytest

from forge_data import DataError, tokenize
from forge_data.formats._tool_calls import checked_calls, function_call


def arguments(value):
    (call,) = checked_calls("f:1", "calls", [{"function": {"name": "f", "arguments": value}}])
    return call["function"]["arguments"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": {"b": [1, null, "é"]}}', {"a": {"b": [1, None, "é"]}}),
        ({"a": None}, {"a": None}),
        ("{}", {}),
        (' {"a": 1.0}\n', {"a": 1.0}),
        # What is no object stays what it is: the lint names it.
        ('{"a": ', '{"a": '),
        ("", ""),
        ("null", "null"),
        ("[1]", "[1]"),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": NaN}', '{"a": NaN}'),
        (None, None),
        ([1], [1]),
    ],
)
def test_arguments(written, read):
    """Arguments that are a JSON object in a string become the object; everything else is kept."""
    assert arguments(written) == read


def test_missing_arguments_are_null():
    """A call without arguments has null ones, as a table makes of them."""
    (call,) = checked_calls("f:1", "calls", [{"function": {"name": "f"}}])
    assert call == {"function": {"name": "f", "arguments": None}}


def test_flat():
    """Name and arguments beside the id belong to the function."""
    (call,) = checked_calls("f:1", "calls", [{"id": "1", "name": "f", "arguments": "{}", "function": None}])
    assert call == {"id": "1", "function": {"name": "f", "arguments": {}}}
    assert function_call("f:1", "v", {"name": "f", "arguments": {"a": 1}}) == {
        "type": "function",
        "function": {"name": "f", "arguments": {"a": 1}},
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("f()", r"field calls is the string 'f\(\)'; it must be a list of tool calls"),
        (["f"], r"field calls\[0\] is the string 'f'; it must be \{"),
        ([{}], r"field calls\[0\].function is null; a call must be \{"),
        ([{"function": "f"}], r"field calls\[0\].function is the string 'f'; a call must be \{"),
        ([{"function": {"arguments": {}}}], r"field calls\[0\].function.name is null; it must be a string"),
        ([{"function": {"name": "f", "args": {}}}], r"field calls\[0\].function.args is an object .*which no template reads"),
        ([{"function": {"name": "f"}, "extra": 1}], r"field calls\[0\].extra is int 1, which no template reads"),
        ([{"type": "custom", "function": {"name": "f"}}], r"field calls\[0\].type is the string 'custom'; only function calls"),
        ([{"function": {"name": "f", "arguments": {"a": ["\ud800"]}}}],
         r"field calls\[0\].function.arguments.a\[0\] holds the lone surrogate U\+D800"),
        ([{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}], r"arguments.a holds the lone surrogate U\+D800"),
        ([{"function": {"name": "f", "arguments": {"\ud800": 1}}}], r"lone surrogate U\+D800"),
    ],
)  # fmt: skip
def test_refused(value, expected):
    """Errors name the field."""
    with pytest.raises(DataError, match=expected):
        checked_calls("f:1", "calls", value)


def test_arguments_as_a_string_for_templates_that_want_one(with_template):
    """A template that can only add strings gets a call's arguments as JSON, and the call is learned."""
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": '{"city": "Ulm"}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    example = tokenize({"messages": messages}, tokenizer)
    assert tokenizer.decode(example.labels[example.labels != -100].tolist()) == 'look {"city": "Ulm"}<|im_end|>'
