"""LLaMA-Factory's rows of preferences and KTO mean here what they mean there."""

import json

import pytest

from forge_data import BadPairError, DataError
from forge_data._formats import BUILT_IN
from forge_data.formats._registry import built_in, convert, detect
from forge_data.formats._samples import Preference
from forge_data.reading._record import record
from forge_data.reading._sources import resolve

from ..llama_factory import converted

HUMAN, GPT, AGAIN = ({"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}, {"from": "human", "value": "again"})
GOOD, BAD = {"from": "gpt", "value": "yes"}, {"from": "gpt", "value": "no"}
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
SHAREGPT = {"messages": "conversations", "system": "system", "tools": "tools"}
SIDES = {"chosen": "chosen", "rejected": "rejected"}
CALLS = '{"name": "add", "arguments": {"a": 1}}'
OPENAI = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function",
    "system_tag": "system",
}
SHAREGPT_PAIR = {"formatting": "sharegpt", "ranking": True, "columns": SHAREGPT | SIDES}
SHAREGPT_KTO = {"formatting": "sharegpt", "columns": SHAREGPT | {"kto_tag": "kto_tag"}}
ALPACA_PAIR = {"ranking": True, "columns": ALPACA | SIDES}
ALPACA_KTO = {"columns": ALPACA | {"kto_tag": "kto_tag"}}
OPENAI_PAIR = {"formatting": "sharegpt", "ranking": True, "tags": OPENAI, "columns": {"messages": "messages"} | SIDES}
OPENAI_KTO = {"formatting": "sharegpt", "tags": OPENAI, "columns": {"messages": "messages", "kto_tag": "kto_tag"}}


def openai(turn):
    return {"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": turn["value"]}


def plain(messages):
    """Messages as LLaMA-Factory has them: (role, content) and the system prompt apart, calls as JSON."""
    roles = {"tool": "observation"}
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    said = []
    for message in messages[bool(system) :]:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said.append(("function", calls) if calls else (roles.get(message["role"], message["role"]), message["content"]))
    return said, system


def decoded(turns):
    """Turns of the oracle with calls as lists."""
    return [(role, [json.loads(content)] if role == "function" else content) for role, content in turns]


def check(row, entry):
    """A row, as it is detected, has the prompt, the answers and the label that the oracle gives it."""
    made = convert(detect("f:1", row), "f:1", row, None)
    prompt, answers, wanted, system, tools = converted(row, entry)
    sides = [made.chosen, made.rejected] if isinstance(made, Preference) else [made.answer]
    assert len(sides) == len(answers)
    for side, answer in zip(sides, answers, strict=True):
        said, own = plain(side.messages)
        assert said == decoded([*prompt, answer])
        assert own == system
        assert side.first_completion == len(side.messages) - 1  # the answer alone is learned
        assert side.tools == (json.loads(tools) if tools else None)
    assert getattr(made, "desirable", None) is wanted


ROWS = [
    ({"conversations": [HUMAN], "chosen": GOOD, "rejected": BAD}, SHAREGPT_PAIR),
    ({"conversations": [HUMAN, GPT, AGAIN], "chosen": GOOD, "rejected": BAD, "system": "be brief"}, SHAREGPT_PAIR),
    ({"conversations": [{"from": "system", "value": "s"}, HUMAN], "chosen": GOOD, "rejected": BAD}, SHAREGPT_PAIR),
    (
        {
            "conversations": [HUMAN, {"from": "function_call", "value": CALLS}, {"from": "observation", "value": "2"}],
            "chosen": GOOD,
            "rejected": BAD,
            "tools": '[{"name": "add"}]',
        },
        SHAREGPT_PAIR,
    ),
    (
        {"conversations": [HUMAN], "chosen": {"from": "function_call", "value": CALLS}, "rejected": BAD},
        SHAREGPT_PAIR,
    ),
    ({"conversations": [HUMAN, GOOD], "kto_tag": True}, SHAREGPT_KTO),
    ({"conversations": [HUMAN, GPT, AGAIN, BAD], "kto_tag": False, "system": "s"}, SHAREGPT_KTO),
    ({"instruction": "i", "input": "d", "chosen": "yes", "rejected": "no"}, ALPACA_PAIR),
    (
        {"instruction": "i", "chosen": "yes", "rejected": "no", "system": "s", "history": [["a", "b"], ["c", "d"]]},
        ALPACA_PAIR,
    ),
    ({"instruction": "i", "input": "", "output": "yes", "kto_tag": True}, ALPACA_KTO),
    ({"instruction": "i", "input": "d", "output": "no", "kto_tag": False, "history": [["a", "b"]]}, ALPACA_KTO),
    ({"messages": [openai(HUMAN)], "chosen": openai(GOOD), "rejected": openai(BAD)}, OPENAI_PAIR),
    (
        {"messages": [{"role": "system", "content": "s"}, openai(HUMAN), openai(BAD)], "kto_tag": False},
        OPENAI_KTO,
    ),
]


@pytest.mark.parametrize(("row", "entry"), ROWS)
def test_read_as_there(row, entry):
    """Prompt, system message, tools and answers are those of its converter, and the answer alone is learned."""
    check(row, entry)


@pytest.mark.parametrize(("row", "entry"), ROWS)
def test_read_as_there_where_columns_and_roles_have_other_names(row, entry, tmp_path):
    """An entry of dataset_info.json gives columns, roles and fields of turns any names."""
    names = {column: f"my_{column}" for column in row}
    tags = {tag: f"my_{name}" for tag, name in entry.get("tags", {}).items()}

    def renamed(turn):
        old = entry["tags"]
        role = next(tag for tag, name in old.items() if name == turn["role"])
        return {tags["role_tag"]: tags[role], tags["content_tag"]: turn["content"]}

    def other(value):
        if not tags or not isinstance(value, (dict, list)):
            return value
        return [renamed(turn) for turn in value] if isinstance(value, list) else renamed(value)

    given = {names[column]: other(value) for column, value in row.items()}
    described = entry | {"columns": {ours: f"my_{column}" for ours, column in entry["columns"].items() if column in row}}
    described |= {"tags": tags} if tags else {}
    (tmp_path / "rows.json").write_text(json.dumps([given]))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": described | {"file_name": "rows.json"}}))
    (source,) = resolve(f"{tmp_path}/dataset_info.json:mine")
    (found,) = source.records()
    made = convert(detect(found.place, found.fields), "f:1", found.fields, None)
    assert made == convert(detect("f:1", row), "f:1", row, None)
    assert converted(given, described) == converted(row, entry)


def test_rows_that_are_learned_stay_what_they_were():
    """Whole conversations on both sides, and rows without a rating, have the format that they had."""
    side = [openai(HUMAN), openai(GOOD)]
    for name, row in {
        "sharegpt": {"conversations": [HUMAN, GPT], "chosen": None, "rejected": None},
        "messages": {"messages": side},
        "alpaca": {"instruction": "i", "output": "o", "kto_tag": None},
        "preference": {"prompt": "p", "chosen": "a", "rejected": "b", "instruction": "i"},
        "unpaired_preference": {"prompt": "p", "completion": "a", "kto_tag": True},
    }.items():
        assert detect("f:1", record(1, row, 0, "f:1").fields) == name
    with pytest.raises(DataError, match="more than one format"):
        detect("f:1", {"messages": side, "chosen": side, "rejected": [openai(HUMAN), openai(BAD)]})


def test_a_tag_is_never_passed_over():
    """A rated conversation is no row of plain training, until its format is chosen by name."""
    row = {"conversations": [HUMAN, BAD], "kto_tag": False}
    assert detect("f:1", row) == "unpaired_preference"
    assert convert("sharegpt", "f:1", row, None).messages[-1]["content"] == "no"
    assert (
        detect("f:1", record(1, {"conversations": [HUMAN], "chosen": GOOD, "rejected": None}, 0, "f:1").fields) == "preference"
    )


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"conversations": [HUMAN, GPT], "chosen": GOOD, "rejected": BAD}, r"conversations\[1\].* is of the role 'assistant'"),
        ({"conversations": [HUMAN], "chosen": HUMAN, "rejected": BAD}, "field chosen is a turn of the role 'user'"),
        ({"conversations": [HUMAN], "chosen": {"role": "assistant"}, "rejected": BAD}, r"field chosen\.content is null"),
        ({"conversations": [HUMAN], "chosen": 3, "rejected": BAD}, "field chosen is int 3; it must be text, or one turn"),
        ({"conversations": [HUMAN, GPT, AGAIN], "kto_tag": True}, r"conversations\[2\].* kto_tag rates the last turn"),
        ({"conversations": [HUMAN, GPT], "kto_tag": "maybe"}, "field kto_tag is the string 'maybe'.* choose sharegpt"),
        ({"messages": [openai(GOOD)], "system": "s", "kto_tag": True, "chosen": "x"}, None),
        ({"prompt": "p", "completion": "a", "kto_tag": True, "label": False}, "label is false and kto_tag true"),
    ],
)
def test_refused(row, error):
    """What cannot be meant is refused by its place in the row."""
    if error is None:
        convert(detect("f:1", row), "f:1", row, None)
        return
    with pytest.raises(DataError, match=error):
        convert(detect("f:1", row), "f:1", row, None)


def test_cells_of_text():
    """In a CSV file conversations and turns are JSON; an answer that is JSON of another kind is text."""
    row = {"conversations": [HUMAN], "chosen": GOOD, "rejected": BAD}
    assert convert("preference", "f:1", {name: json.dumps(value) for name, value in row.items()}, None) == convert(
        "preference", "f:1", row, None
    )
    answer = convert("preference", "f:1", row | {"chosen": '{"a": 1}'}, None).chosen.messages[-1]
    assert answer["content"] == '{"a": 1}'


def test_pairs_that_prefer_nothing():
    """Equal and empty answers have their reasons, as in other preferences."""
    for chosen, rejected, reason in ((GOOD, GOOD, "same_answers"), (GOOD, GOOD | {"value": ""}, "empty_answer")):
        row = {"conversations": [HUMAN], "chosen": chosen, "rejected": rejected}
        with pytest.raises(BadPairError) as caught:
            convert("preference", "f:1", row, None)
        assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("row", "answer", "fields"),
    [
        (ROWS[1][0], "chosen", ["system", *(f"conversations[{at}].value" for at in range(3)), "chosen.value"]),
        (ROWS[6][0], "completion", ["system", *(f"conversations[{at}].value" for at in range(4))]),
        (ROWS[8][0], "rejected", ["system", *(f"history[{at // 2}][{at % 2}]" for at in range(4)), "instruction", "rejected"]),
        (ROWS[9][0], "completion", ["instruction", "output"]),
        (ROWS[11][0], "rejected", ["messages[0].content", "rejected.content"]),
    ],
)
def test_findings_name_the_fields_of_the_row(row, answer, fields):
    """A finding names where its text stands."""
    name = detect("f:1", row)
    assert name in BUILT_IN
    assert [built_in(name).field_of(row, at, "content", answer) for at in range(len(fields))] == fields
