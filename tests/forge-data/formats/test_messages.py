"""Messages are checked field by field."""

import pytest

from forge_data import DataError
from forge_data.formats._messages import checked_messages

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def bot(**more):
    return {"role": "assistant", "content": "x"} | more


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hi", r"f:3: field messages is the string 'hi'; it must be a list of messages"),
        ([], r"f:3: field messages is an empty list"),
        ([USER, "hi"], r"f:3: field messages\[1\] is the string 'hi'; it must be \{"),
        ([{"content": "hi"}], r"f:3: field messages\[0\] is an object with 'content' and lacks a role; allowed: system"),
        ([USER, USER, bot(role="Assistant")],
         r"f:3: field messages\[2\].role is the string 'Assistant'; allowed: system, developer, user, assistant, tool; did you "
         r"mean 'assistant'\?"),
        ([bot(role="gpt")], r"messages\[0\].role is the string 'gpt'; .* did you mean 'assistant'"),
        ([bot(role="narrator")], r"messages\[0\].role is the string 'narrator'; allowed: system, developer, user, assistant, "
                                 r"tool$"),
        ([{"role": 1, "content": "x"}], r"f:3: field messages\[0\].role is int 1; allowed"),
        ([{"role": ["user"], "content": "x"}], r"f:3: field messages\[0\].role is a list of 1; allowed"),
        ([{"role": "user"}], r"f:3: field messages\[0\].content is null; it must be a string"),
        ([{"role": "user", "content": None}], r"f:3: field messages\[0\].content is null; it must be a string"),
        ([{"role": "user", "content": 3}], r"f:3: field messages\[0\].content is int 3; it must be a string"),
        ([bot(content=None)], r"messages\[0\].content is null; it must be a string, or the message must have tool_calls"),
        ([bot(content=None, tool_calls=[])], r"messages\[0\].content is null; it must be a string, or"),
        ([USER | {"content": []}], r"messages\[0\].content is a list of 0; it must be a string"),
        ([USER | {"content": ["x"]}], r"messages\[0\].content\[0\] is the string 'x'; a part must be"),
        ([USER | {"content": [{"type": "text"}]}], r"content\[0\] is an object with 'type'; a part must be"),
        ([USER | {"content": [{"type": "image_url", "image_url": {}}]}], r"content\[0\] is a part of the type 'image_url', "
                                                                         r"and only text is trained here: forge sft, .*"
                                                                         r"train images, .*; take the row out"),
        ([USER | {"content": [{"type": "file", "file": {}}]}], r"content\[0\] is a part of the type 'file'; a part is text "
                                                               r"\(.*\), an image, a video or audio: take the row out"),
        ([USER | {"content": [{"type": "text", "text": "x", "cache": 1}]}], r"content\[0\].cache is int 1; a part has type and "
                                                                            r"text"),
        ([bot(audio={"id": 1})], r"messages\[0\].audio is an object with 'id', which is not known, and would be ignored; "
                                 r"known: role"),
        ([bot(function_call={"name": "f"})], r"messages\[0\].function_call is an object with 'name'; write it as tool_calls"),
        ([USER | {"tool_calls": [CALL]}], r"messages\[0\].tool_calls is a list of 1, but the message is of the role 'user'; "
                                          r"only assistant"),
        ([USER | {"reasoning_content": "x"}], r"messages\[0\].reasoning_content is the string 'x', but the message is of the "
                                              r"role 'user'"),
        ([bot(tool_call_id="1")], r"messages\[0\].tool_call_id is the string '1', but .* only tool messages have"),
        ([bot(reasoning_content=3)], r"messages\[0\].reasoning_content is int 3; it must be a string"),
        ([bot(name=3)], r"messages\[0\].name is int 3; it must be a string"),
        ([bot(train="false")], r"messages\[0\].train is the string 'false'; it must be true or false"),
        ([bot(train=0)], r"messages\[0\].train is int 0; it must be true or false"),
        ([bot(weight=-0.5)], r"messages\[0\].weight is float -0.5; a weight is a finite number from 0"),
        ([bot(weight=True)], r"messages\[0\].weight is true; a weight is"),
        ([USER | {"weight": 0.5}], r"messages\[0\] is of the role 'user' and its weight asks"),
        ([bot(weight=1, train=False)], r"messages\[0\].train is false, but its weight is 1; keep one"),
        ([USER | {"loss": True}], r"messages\[0\] is of the role 'user' and its loss asks for it to be learned, .* write "
                                  r"\"train\": true .*, or name the role in `train_on` \(assistant,user\)"),
        ([{"role": "user", "content": "a\ud800b"}], r"messages\[0\].content holds the lone surrogate U\+D800 at position 1"),
        ([bot(reasoning_content="\udc00")], r"messages\[0\].reasoning_content holds the lone surrogate U\+DC00"),
    ],
)  # fmt: skip
def test_refused(value, expected):
    """Errors name place and field, what was found and what is allowed."""
    with pytest.raises(DataError, match=expected):
        checked_messages("f:3", "messages", value)


def test_null_fields_are_absent():
    """A table gives every message every field; those that are null count as absent."""
    given = USER | {"name": None, "tool_calls": None, "train": None, "audio": None}
    assert checked_messages("f:1", "messages", [given]) == ([USER], None, None, (), {})


def test_all_that_templates_read():
    """Reasoning, names, calls and their results are kept for the template."""
    rows = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        USER,
        bot(content=None, tool_calls=[CALL], reasoning_content="hm", thinking="so"),
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"},
        bot(reasoning=""),
    ]
    messages, trains, weights, _, _ = checked_messages("f:1", "messages", rows)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert messages == [*rows[:2], rows[2] | {"tool_calls": [call]}, *rows[3:]]
    assert trains is weights is None


def test_no_content_beside_a_call():
    """A missing content is null, as OpenAI writes it."""
    row = {"role": "assistant", "tool_calls": [CALL]}
    assert checked_messages("f:1", "messages", [row]).messages[0]["content"] is None
    assert (
        checked_messages("f:1", "messages", [{"role": "assistant", "reasoning_content": "hm"}]).messages[0]["content"] is None
    )


def test_parts():
    """Text in parts becomes one text."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image_url": None}, {"text": "c"}]
    assert checked_messages("f:1", "messages", [USER | {"content": parts}]).messages == [{"role": "user", "content": "a bc"}]


def test_trains():
    """train and weight decide which messages may be learned, and do not reach the template."""
    rows = [
        USER | {"weight": 0},
        bot(train=False),
        USER,
        bot(),
        USER | {"train": False},
        bot(weight=1),
        bot(weight=0, train=False),
    ]
    messages, trains, weights, _, _ = checked_messages("f:1", "messages", rows)
    assert trains == (False, False, True, True, False, True, False)
    assert weights is None
    assert all(message.keys() == {"role", "content"} for message in messages)


def test_an_empty_prompt():
    """A prompt without messages may precede a completion that has its own."""
    assert checked_messages("f:1", "prompt", [])[:2] == ([], None)
    with pytest.raises(DataError, match="field completion is an empty list"):
        checked_messages("f:1", "completion", [])
