"""Field of the row that a message came from, for every format."""

import pytest

from forge_data._options import Options
from forge_data.findings._rules import Where
from forge_data.formats._registry import convert, detect, format_named
from forge_data.linting._row import RowLint

from ..lint_rows import tokenizer


def message(role, content):
    return {"role": role, "content": content}


def printed(speaker, text):
    return {"from": speaker, "value": text}


# A row with one broken character, and the field where it stands.
BAD = "caf\ufffd"
USER, ANSWER, GOOD = message("user", "why"), message("assistant", "so"), message("assistant", "no")
ROWS = [
    ({"messages": [USER, message("assistant", BAD)]}, "messages[1].content"),
    ({"messages": [USER, {**ANSWER, "reasoning_content": BAD}]}, "messages[1].reasoning_content"),
    ({"messages": [message("system", BAD), USER, ANSWER]}, "messages[0].content"),
    ({"conversations": [printed("human", "why"), printed("gpt", BAD)]}, "conversations[1].value"),
    ({"system": "be", "conversations": [printed("human", BAD), printed("gpt", "so")]}, "conversations[0].value"),
    ({"system": BAD, "conversations": [printed("human", "why"), printed("gpt", "so")]}, "system"),
    ({"conversations": [USER, message("assistant", BAD)]}, "conversations[1].content"),
    ({"instruction": BAD, "input": "", "output": "so"}, "instruction"),
    ({"instruction": "why", "input": "", "output": BAD}, "output"),
    ({"instruction": "why", "output": "so", "system": BAD}, "system"),
    ({"instruction": "why", "output": "so", "history": [["a", "b"], ["c", BAD]]}, "history[1][1]"),
    ({"instruction": "why", "output": "so", "system": "be", "history": [[BAD, "b"]]}, "history[0][0]"),
    ({"prompt": BAD, "completion": "so"}, "prompt"),
    ({"prompt": "why", "completion": BAD}, "completion"),
    ({"prompt": [message("user", BAD)], "completion": [ANSWER]}, "prompt[0].content"),
    ({"prompt": [USER], "completion": [message("assistant", BAD)]}, "completion[0].content"),
    ({"text": BAD}, "text"),
    ({"document": BAD}, "document"),
    ({"prompt": [message("user", BAD)], "chosen": [ANSWER], "rejected": [GOOD]}, "prompt[0].content"),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [message("assistant", BAD)]}, "rejected[0].content"),
    ({"chosen": [message("user", BAD), ANSWER], "rejected": [message("user", BAD), GOOD]}, "chosen[0].content"),
    ({"chosen": [USER, ANSWER], "rejected": [USER, message("assistant", BAD)]}, "rejected[1].content"),
    ({"prompt": "why ", "chosen": "so", "rejected": BAD}, "rejected"),
    ({"prompt": BAD, "chosen": "so", "rejected": "no"}, "prompt"),
    ({"chosen": f"{BAD} why so", "rejected": f"{BAD} why no"}, "chosen"),
    ({"prompt": "why ", "completion": BAD, "label": True}, "completion"),
    ({"prompt": [USER], "completion": [message("assistant", BAD)], "label": False}, "completion[0].content"),
]


@pytest.fixture(scope="module")
def rules():
    return RowLint(tokenizer(), Options())


@pytest.mark.parametrize(("fields", "field"), ROWS)
def test_what_is_wrong_is_named_by_its_field_in_the_file(fields, field, rules):
    """A finding names the row's own field, once; what both sides of a preference share is linted once."""
    name = detect("a.jsonl:1", fields)
    sample, where = convert(name, "a.jsonl:1", fields, None), Where.of("a.jsonl:1")
    findings = rules.check(where, fields, sample, None, format_named(name).field_of)
    found = [each.field for each in findings if each.rule == "broken_unicode"]
    assert found == [field]


def test_parts_of_calls():
    """A part of a message follows its field; ShareGPT keeps a whole call in one value."""
    calls = {"type": "function", "function": {"name": "a", "arguments": {}}}
    rows = [
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [calls]}]},
        {"conversations": [printed("human", "why"), printed("function_call", '{"name": "a", "arguments": {}}')]},
    ]
    fields = []
    for row in rows:
        field_of = format_named(detect("a:1", row)).field_of
        fields += [field_of(row, 1, part, "completion") for part in ("tool_calls[0].function.name", "role", "")]
    assert fields == [
        "messages[1].tool_calls[0].function.name",
        "messages[1].role",
        "messages[1]",
        "conversations[1].value",
        "conversations[1].from",
        "conversations[1]",
    ]
