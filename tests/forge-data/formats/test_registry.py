"""Which format a row has, errors for rows of none, and fields that must not be ignored."""

import pickle
import re

import numpy as np
import pytest

from forge_data import BadPairError, DataError
from forge_data._formats import BUILT_IN
from forge_data.formats._registry import check_name, convert, detect
from forge_data.formats._samples import Chat, Document, Preference, Text, Tokens, Unpaired
from forge_data.reading._record import record

USER, BOT, BAD = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "assistant", "content": "no"},
)
ROWS = {
    "messages": ({"messages": [USER, BOT]}, Chat),
    "sharegpt": ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, Chat),
    "alpaca": ({"instruction": "hi", "input": "", "output": "ho"}, Chat),
    "ms_swift": ({"query": "hi", "response": "ho"}, Chat),
    "prompt_completion": ({"prompt": "a", "completion": "b"}, Text),
    "prompt_completion of messages": ({"prompt": [USER], "completion": [BOT]}, Chat),
    "text": ({"text": "a"}, Document),
    "text as document": ({"document": "a"}, Document),
    "preference": ({"prompt": "a", "chosen": "b", "rejected": "c"}, Preference),
    "preference of messages": ({"prompt": [USER], "chosen": [BOT], "rejected": [BAD]}, Preference),
    "preference without prompt": ({"chosen": [USER, BOT], "rejected": [USER, BAD]}, Preference),
    "unpaired_preference": ({"prompt": "a", "completion": "b", "label": False}, Unpaired),
    "tokenised": ({"input_ids": [1, 2], "labels": [-100, 2], "len": 2}, Tokens),
}
ASKED = {
    "document": ({"text": "a"}, Document),
    "document of tokens": ({"input_ids": [1, 2]}, Tokens),
    "document of labels": ({"input_ids": [1, 2], "labels": [-100, 2]}, Tokens),
}
IN_TEXT = {name for name, (_, kind) in ROWS.items() if kind in (Text, Document, Tokens)} | {"preference", "unpaired_preference"}
KINDS = sorted(ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_known(kind):
    """Each format is detected, also beside fields without meaning, and becomes its type of sample."""
    row, made = ROWS[kind]
    name = kind.split(" ")[0]
    assert detect("f:1", row | {"source": "web", "id": 3}) == name
    sample = convert(name, "f:1", row | {"source": "web", "id": 3}, None)
    assert type(sample) is made
    assert sample.place == "f:1"


def test_every_format_is_tried():
    """The rows above cover every format."""
    assert {kind.split(" ")[0] for kind in (*KINDS, *ASKED)} == set(BUILT_IN)


@pytest.mark.parametrize("kind", ASKED)
def test_only_where_it_is_asked_for(kind):
    """A row with the fields of a document is never detected as one; chosen by name, it is."""
    row, made = ASKED[kind]
    assert type(convert("document", "f:1", row, None)) is made
    if kind == "document of tokens":
        with pytest.raises(DataError, match="give labels beside input_ids"):
            detect("f:1", row)
    else:
        assert detect("f:1", row) in ("text", "tokenised")


@pytest.mark.parametrize("row", [{"prompt": "a", "chosen": "b"}, {"rejected": "b"}])
def test_half_a_preference(row):
    """A row with one side alone (the other was null) is a preference, and refused for the missing side."""
    assert detect("f:1", row) == "preference"
    with pytest.raises(BadPairError, match="f:1: field (chosen|rejected) is null or not there; give the answer"):
        convert("preference", "f:1", row, None)


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_never_a_guess(one, other):
    """A row with the fields of two formats is refused with both names, unless one is chosen."""
    first, second = one.split(" ")[0], other.split(" ")[0]
    row = ROWS[one][0] | ROWS[other][0]
    if first == second or {first, second} == {"prompt_completion", "unpaired_preference"}:
        return
    with pytest.raises(
        DataError, match="f:1 has the fields .*, which fit more than one format: .*; say which is meant"
    ) as caught:
        detect("f:1", row)
    for name in (first, second):
        assert name in str(caught.value) or (name == "prompt_completion" and "unpaired_preference" in str(caught.value))
    if not row.keys() & {"prompt", "tools"} or first == "messages":
        assert type(convert(first, "f:1", row, None)) is ROWS[one][1]


def test_a_label_is_not_passed_over():
    """Prompt and completion with a label are an unpaired preference, unless prompt_completion is chosen."""
    row = {"prompt": "a", "completion": "b", "label": "spam"}
    assert detect("f:1", row) == "unpaired_preference"
    with pytest.raises(
        DataError,
        match="f:1: field label is the string 'spam'; it must be true .*choose prompt_completion as `format`, which ignores it",
    ):
        convert("unpaired_preference", "f:1", row, None)
    assert convert("prompt_completion", "f:1", row, None) == Text("f:1", "a", "b")


def test_unknown():
    """A row of no known format is refused with its fields, and with the formats that are known."""
    with pytest.raises(
        DataError, match=r"f:9 has the fields 'body', 'id', which are no known format; known: messages \(messages\); s"
    ):
        detect("f:9", {"body": "x", "id": 1})
    with pytest.raises(DataError, match=r"f:9 has the fields \(none\)"):
        detect("f:9", {})


def test_hints():
    """Errors hint at the most common mistakes: ids without labels, and rows within a field."""
    with pytest.raises(DataError, match="give labels beside input_ids: the id where a token is learned, -100 elsewhere"):
        detect("f:1", {"input_ids": [1]})
    with pytest.raises(
        DataError, match=r"if the rows stand inside data, write one of them a line \(`jq -c '.data\[\]'` does\)"
    ):
        detect("f[0]", {"version": "1", "data": [ROWS["messages"][0]]})


@pytest.mark.parametrize(
    ("row", "meant"),
    [
        ({"mesages": [{"role": "user", "content": "a"}]}, "'messages'"),
        ({"instrucion": "a", "outptu": "b"}, "'instruction' and 'output'"),
        ({"prompt": "a", "completoin": "b"}, "'completion'"),
    ],
)
def test_misspelt(row, meant):
    """A field that is misspelt is answered with the known one, and not with what else might be done to the file."""
    with pytest.raises(DataError, match=rf"no known format; did you mean {meant}\? Known: messages") as caught:
        detect("f:21", row)
    assert "jq" not in str(caught.value)
    assert "without an answer" not in str(caught.value)


def test_turns_are_no_rows():
    """A conversation under a name of its own may be renamed; its turns are not said to be rows."""
    with pytest.raises(DataError, match=r"rename_columns`, such as dialog=messages") as caught:
        detect("f:1", {"dialog": [{"role": "user", "content": "a"}]})
    assert "jq" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_asked_for(name):
    """A row that lacks what its chosen format needs is refused."""
    with pytest.raises(DataError, match=f"f:1 has the fields 'body', but the format {name} needs "):
        convert(name, "f:1", {"body": "x"}, None)


def test_names():
    """An unknown format is refused with the nearest."""
    for name in ("auto", *BUILT_IN):
        check_name(name)
    for wrong, near in (("message", "messages"), ("shareGPT", "sharegpt"), ("tokenized", "tokenised"), ("dpo", None)):
        with pytest.raises(
            DataError, match=f"`format` is {wrong!r}; allowed: auto, messages, .*" + (f"mean {near!r}" if near else "")
        ):
            check_name(wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["tools", "documents", "chat_template_kwargs", "unmask"])
def test_what_only_templates_read(kind, field):
    """Template fields are refused in formats without a template, and allowed where they are empty."""
    row, name = ROWS[kind][0], kind.split(" ")[0]
    value = {"unmask": True, "chat_template_kwargs": {"x": 1}}.get(field, [{"name": "f"}])
    if kind in IN_TEXT:
        with pytest.raises(DataError, match=f"f:1: field {field} is "):
            convert(name, "f:1", row | {field: value}, None)
    else:
        convert(name, "f:1", row | {field: value}, None)
    convert(name, "f:1", row | {field: type(value)()}, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "what_to_do"),
    [
        ("functions", "read from tools"),
        ("images", "only text is trained here: forge sft, osft, "),
        ("audios", "only text is trained here: forge sft, osft, "),
        ("loss_mask", "write the mask into labels as -100"),
        ("completion_mask", "write the mask into labels as -100"),
        ("assistant_masks", "write the mask into labels as -100"),
        ("position_ids", "one row, one sample"),
        ("token_type_ids", "not passed to the model"),
        ("seq_lengths", "one row, one sample"),
    ],
)
def test_a_column_beside(kind, field, what_to_do):
    """Masks, positions and packing that would be ignored are refused, zeros and arrays too; empty ones are not."""
    row, name = ROWS[kind][0], kind.split(" ")[0]
    for value in ([0, 0], np.zeros(2, dtype=int)):
        with pytest.raises(DataError, match=f"f:1: field {field} is .*, and .*{what_to_do}.*; take it out of the rows"):
            convert(name, "f:1", row | {field: value}, None)
    for value in ([], np.zeros(0, dtype=int)):
        convert(name, "f:1", row | {field: value}, None)


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
SYSTEM = {"role": "system", "content": "Be kind."}
BESIDE_A_SYSTEM = {
    "messages": {"messages": TURNS},
    "prompt_completion": {"prompt": TURNS[:1], "completion": TURNS[1:]},
    "prompt_completion text": {"prompt": "Hi", "completion": "Ho"},
    "unpaired_preference": {"prompt": TURNS[:1], "completion": TURNS[1:], "label": True},
    "preference": {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "No"}]},
}


@pytest.mark.parametrize("kind", BESIDE_A_SYSTEM)
def test_a_system_prompt_beside(kind):
    """One that no format would write is refused; an empty one, and one that the messages begin with, is not."""
    row, name = BESIDE_A_SYSTEM[kind], kind.split(" ")[0]
    with pytest.raises(DataError, match=r"f:1: field system is the string .*make it the first message.*preprocess"):
        convert(name, "f:1", row | {"system": "Be kind."}, None)
    convert(name, "f:1", row | {"system": ""}, None)
    begun = {field: [SYSTEM, *value] for field, value in row.items() if field in ("messages", "prompt") and "text" not in kind}
    assert not begun or convert(name, "f:1", row | begun | {"system": "Be kind."}, None)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be kind."}]}, *TURNS]},
        {"messages": [{"role": "developer", "content": "Be kind."}, *TURNS]},
        {"messages": [{"role": "system", "content": "Be kind.\n"}, *TURNS]},
        {"prompt": "Be kind. Hi", "completion": "Ho"},
        {"messages": TURNS, "system": " "},
        {"messages": TURNS, "system": True},
    ],
)
def test_a_system_prompt_that_is_there_is_not_refused(row):
    """In parts, as a developer's, with other white space, at the beginning of text, or where the field is no prompt."""
    assert convert("messages" if "messages" in row else "prompt_completion", "f:1", {"system": "Be kind.", **row}, None)
    if "system" not in row:
        with pytest.raises(DataError, match="field system"):
            convert("messages" if "messages" in row else "prompt_completion", "f:1", {"system": "Be brief.", **row}, None)


@pytest.mark.parametrize("kind", KINDS)
def test_margins(kind):
    """A margin is read of preferences, and refused beside anything else."""
    row, name = ROWS[kind][0], kind.split(" ")[0]
    if name == "preference":
        assert convert(name, "f:1", row | {"margin": 0.5}, None).margin == 0.5
        assert convert(name, "f:1", row, None).margin is None
        return
    with pytest.raises(
        DataError, match="f:1: field margin is .*, and margins are read of rows with chosen and rejected; take it out"
    ):
        convert(name, "f:1", row | {"margin": 0.5}, None)


def test_two_documents():
    """A row holds one document."""
    with pytest.raises(DataError, match="f:1 has both text and document; keep the one that is to be learned"):
        convert("text", "f:1", {"text": "a", "document": "b"}, None)
    with pytest.raises(DataError, match="f:1: field text is int 3; it must be a string"):
        convert("text", "f:1", {"text": 3}, None)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": None}, "f:1: field messages is null; give a value, or take the row out"),
        ({"prompt": "a", "completion": None, "id": None}, "f:1: field completion is null; give"),
        ({"instruction": None, "output": None, "input": "a"}, "f:1: fields instruction and output are null; give"),
        ({"id": None, "body": "a"}, "f:1 has the fields 'body', which are no known format"),
    ],
)
def test_a_field_that_is_null_is_named(row, expected):
    """It was given, so the row is not told that it has not it; whether its format is detected or chosen."""
    fields = pickle.loads(pickle.dumps(record(1, row, 0, "f:1").fields))
    assert fields == {name: value for name, value in row.items() if value is not None}
    with pytest.raises(DataError, match=expected):
        detect("f:1", fields)
    if row.keys() == {"messages"}:
        with pytest.raises(DataError, match=expected):
            convert("messages", "f:1", fields, None)


@pytest.mark.parametrize(("number", "quoted"), [(5, '"5"'), (0.5, '"0.5"'), (True, '"true"')])
def test_a_number_in_the_place_of_text_is_answered_with_what_makes_it_text(number, quoted):
    """In quotes, or by `preprocess`; of a part of a field in quotes only."""
    line = re.escape(
        f"it must be a string: write it in quotes, {quoted}, or make it text with `preprocess`: "
        "{**row, 'output': str(row['output'])}"
    )
    with pytest.raises(DataError, match=f"{line}$"):
        convert("alpaca", "f:1", {"instruction": "a", "output": number}, None)
    with pytest.raises(DataError, match=f"write it in quotes, {quoted}$"):
        convert("messages", "f:1", {"messages": [{"role": "user", "content": number}]}, None)
