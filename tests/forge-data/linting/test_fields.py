"""The field of the row that a message came from, for every format."""

import pytest

from forge_data._options import Options
from forge_data.formats._registry import convert, detect
from forge_data.linting._fields import field_of
from forge_data.linting._row import RowLint

from ..lint_rows import tokenizer


def message(role, content):
    return {"role": role, "content": content}


def said(speaker, text):
    return {"from": speaker, "value": text}


# A row with one broken character, and the field where it stands.
BAD = "caf\ufffd"
USER, ANSWER, GOOD = message("user", "why"), message("assistant", "so"), message("assistant", "no")
ROWS = [
    ({"messages": [USER, message("assistant", BAD)]}, "messages[1].content"),
    ({"messages": [USER, {**ANSWER, "reasoning_content": BAD}]}, "messages[1].reasoning_content"),
    ({"messages": [message("system", BAD), USER, ANSWER]}, "messages[0].content"),
    ({"conversations": [said("human", "why"), said("gpt", BAD)]}, "conversations[1].value"),
    ({"system": "be", "conversations": [said("human", BAD), said("gpt", "so")]}, "conversations[0].value"),
    ({"system": BAD, "conversations": [said("human", "why"), said("gpt", "so")]}, "system"),
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
    """Once, and as it is called in the row, not as the template gets it; what both sides of a preference share is looked at once."""
    sample = convert(detect("a.jsonl:1", fields), "a.jsonl:1", fields, None)
    found = [each.field for each in rules.check("a.jsonl", 1, fields, sample, None) if each.rule == "broken_unicode"]
    assert found == [field]


def test_parts_of_calls():
    """A part of a message is named behind it; ShareGPT keeps a whole call in one value."""
    calls = {"type": "function", "function": {"name": "a", "arguments": {}}}
    rows = [
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [calls]}]},
        {"conversations": [said("human", "why"), said("function_call", '{"name": "a", "arguments": {}}')]},
    ]
    fields = []
    for row in rows:
        chat = convert(detect("a:1", row), "a:1", row, None)
        fields += [
            field_of(row, chat, 1, "tool_calls[0].function.name"),
            field_of(row, chat, 1, "role"),
            field_of(row, chat, 1, ""),
        ]
    assert fields == [
        "messages[1].tool_calls[0].function.name",
        "messages[1].role",
        "messages[1]",
        "conversations[1].value",
        "conversations[1].from",
        "conversations[1]",
    ]
