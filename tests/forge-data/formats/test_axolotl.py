"""Rows of Axolotl's prompt types: texts, ids and labels are Axolotl's own.

The texts in `golden/axolotl_prompts.json` are what Axolotl 0.18 itself makes of `ROW` (067b021c, July 2026), and `axolotl` is
its `InstructionPromptTokenizingStrategy.tokenize_prompt` with `PromptTokenizingStrategy._tokenize` (`prompt_tokenizers.py`).
"""

import json
import re
from pathlib import Path

import attrs
import pytest
from hypothesis import given, strategies as st
from tokenizers import processors

import forge_data
from forge_data import DataError
from forge_data._formats import AXOLOTL_TYPES
from forge_data.formats._axolotl import TYPES
from forge_data.formats._registry import convert

from ..families import FAMILIES

ROW = {
    "instruction": "Add {1}.",
    "input": "fast",
    "output": "3",
    "question": "Why?",
    "answer": "So.",
    "message_1": "m1",
    "message_2": "m2",
    "system": "Be brief.",
    "system_prompt": "You are O.",
    "response": "resp",
    "INSTRUCTION": "INS",
    "RESPONSE": "RES",
    "category": "Art",
    "choices": ["a", "b b"],
    "explanation": "As a.",
    "article": "Long.",
    "summary": "Short.",
    "unanswerable_question": "Where?",
    "context": "Ctx.",
}
EMPTY = {"input": "", "category": "", "choices": []}
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "axolotl_prompts.json").read_text(encoding="utf-8"))


def row_of(kind, **more):
    """The row, without the column `system` where the type does not read it."""
    row = ROW | more
    return row if kind in ("alpaca_w_system", "alpaca_w_system.load_chat", "alpaca_w_system.load_instruct") else without(row)


def without(row):
    return {name: value for name, value in row.items() if name != "system"}


@pytest.fixture(scope="module")
def tokenizers():
    """Of two makes, one of which begins each text with a blank of its own; both put a BOS before it."""
    made = [FAMILIES[name].tokenizer() for name in ("llama-2", "llama-3.1")]
    for tokenizer in made:
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    return made


def axolotl(tokenizer, prompt, response, *, on_inputs=False):
    """Axolotl's ids and labels of a prompt and an answer."""

    def tokenize(text, *, add_eos, strip_bos=False):
        ids = tokenizer(text)["input_ids"] if text else []
        if ids and ids[-1] != tokenizer.eos_token_id and add_eos:
            ids = [*ids, tokenizer.eos_token_id]
        return ids[1:] if ids and ids[0] == tokenizer.bos_token_id and strip_bos else ids

    asked, answered = tokenize(prompt, add_eos=False), tokenize(response, add_eos=True, strip_bos=True)
    return asked + answered, (asked if on_inputs else [-100] * len(asked)) + answered


def test_every_type():
    """The names that can be chosen are those that have a text, each of which Axolotl has written."""
    assert set(AXOLOTL_TYPES) == {*TYPES, "input_output"}
    assert {entry["type"] for entry in GOLDEN} == set(TYPES)


@pytest.mark.parametrize("entry", GOLDEN, ids=[f"{entry['type']}-{entry['with_input']}" for entry in GOLDEN])
def test_texts(entry):
    """Prompt and answer are Axolotl's, letter for letter, with an input and without."""
    row = row_of(entry["type"], **({} if entry["with_input"] else EMPTY))
    made = convert(f"axolotl:{entry['type']}", "f:1", row, None)
    assert made.texts == (entry["prompt"], entry["answer"])


@given(
    instruction=st.text(max_size=12),
    details=st.text(max_size=6),
    output=st.text(max_size=12),
    on_inputs=st.booleans(),
    at=st.integers(0, 1),
)
def test_ids_and_labels(tokenizers, instruction, details, output, on_inputs, at):
    """Whatever the row says, ids and labels are Axolotl's: prompt and answer tokenised apart, one BOS, one EOS."""
    row = {"instruction": instruction, "input": details, "output": output}
    made = convert("axolotl:alpaca:chat", "f:1", row, None)
    ids, labels = axolotl(tokenizers[at], *made.texts, on_inputs=on_inputs)
    if not output and not on_inputs:
        with pytest.raises(DataError, match="no token of it is learned"):
            forge_data.tokenize(row, tokenizers[at], format="axolotl:alpaca:chat")
        return
    train_on = "all" if on_inputs else "assistant"
    example = forge_data.tokenize(row, tokenizers[at], format="axolotl:alpaca:chat", train_on=train_on)
    assert (example.input_ids.tolist(), example.labels.tolist()) == (ids, labels)


def user_defined(own, row):
    """Axolotl's texts of a row (`prompt_strategies/user_defined.py` and `SystemDataPrompter` of `alpaca_w_system.py`)."""
    own = {
        "system_prompt": "", "field_system": "system", "field_instruction": "instruction", "field_input": "input",
        "field_output": "output", "format": "{instruction} {input} ", "no_input_format": "{instruction} ",
        "system_format": "{system}",
    } | own  # fmt: skip
    instruction, output = row[own["field_instruction"]], row[own["field_output"]]
    details = row.get(own["field_input"], "")
    system = row.get(own["field_system"], own["system_prompt"])
    before = own["system_format"].format(system=system) if system and own["system_format"] else ""
    if details:
        return before + own["format"].format(instruction=instruction, input=details), output
    return before + own["no_input_format"].format(instruction=instruction), output


WORD = st.text(st.sampled_from("ab{} \n"), max_size=6)
OWN_TYPE = st.fixed_dictionaries(
    {},
    optional={
        "system_prompt": WORD,
        "system_format": st.sampled_from(["", "<<{system}>>\n", "{{s}} {system}"]),
        "field_system": st.sampled_from(["sys", "system"]),
        "field_instruction": st.sampled_from(["q", "instruction"]),
        "field_input": st.sampled_from(["d", "input"]),
        "field_output": st.sampled_from(["a", "output"]),
        "format": st.sampled_from(["[INST] {instruction} {input} [/INST]", "{input}: {instruction}{instruction}", "{{}}"]),
        "no_input_format": st.sampled_from(["[INST] {instruction} [/INST]", "Q: {instruction}\nA:"]),
    },
)


@given(own=OWN_TYPE, words=st.lists(WORD, min_size=4, max_size=4), has=st.sets(st.sampled_from("ds")), at=st.integers(0, 1))
def test_a_type_of_ones_own(tokenizers, own, words, has, at):
    """Fields and texts that a file defines: texts, ids and labels are Axolotl's, with input and system text and without."""
    row = {own.get("field_instruction", "instruction"): words[0], own.get("field_output", "output"): words[1] + "!"}
    row |= {own.get("field_input", "input"): words[2]} if "d" in has else {}
    row |= {own.get("field_system", "system"): words[3]} if "s" in has else {}
    name = f"axolotl:{json.dumps(own)}"
    expected = user_defined(own, row)
    assert convert(name, "f:1", row, None).texts == expected
    example = forge_data.tokenize(row, tokenizers[at], format=name)
    assert (example.input_ids.tolist(), example.labels.tolist()) == axolotl(tokenizers[at], *expected)


def test_a_store_of_ones_own_type(tokenizers, write_rows, tmp_path):
    """It is a format as any other: in a store, in its numbers, in settings, and of one data set among others."""
    own = 'axolotl:{"field_instruction": "q", "field_output": "a", "no_input_format": "Q: {instruction}\\nA:"}'
    rows = write_rows([{"q": "one", "a": "two"}])
    store = forge_data.prepare({str(rows): {"data_format": own}}, tokenizers[0], tmp_path / "store")
    assert "Q: one" in tokenizers[0].decode(store[0].input_ids)
    assert "axolotl:{…}" in str(forge_data.stats(store))
    assert forge_data.DataSettings(data_path="x", data_format=own).data_format == own
    report = forge_data.lint(write_rows([{"q": "one", "a": " "}]), tokenizers[0], format=own)
    assert [(each.rule, each.field) for each in report.findings] == [("empty_turn", "a")]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("{instruction: q}", "what stands behind 'axolotl:' is no JSON"),
        ('{"field_question": "q"}', "'field_question' is not known behind 'axolotl:'; known: system_prompt, field_system"),
        ('{"field_output": ""}', "field_output behind 'axolotl:' is ''; it must be a text"),
        ('{"format": 3}', "format behind 'axolotl:' is 3; it must be a text"),
        ('{"format": "{question}"}', "it may have {instruction} and {input}, and {{ for a brace"),
        ('{"format": "{instruction.__class__}"}', "it may have {instruction} and {input}"),
        ('{"format": "{instruction!r}"}', "it may have {instruction} and {input}"),
        ('{"no_input_format": "{input}"}', "it may have {instruction}, and"),
        ('{"system_format": "{"}', "in which a brace stands alone"),
    ],
)
def test_a_type_that_is_none(own, message):
    """Refused in settings, of a data set and in Python, with what is wrong in it."""
    for make in (
        lambda: forge_data.DataSettings(data_path="x", data_format=f"axolotl:{own}"),
        lambda: forge_data.DataSettings(data_path={"x": {"data_format": f"axolotl:{own}"}}),
        lambda: forge_data.tokenize(ROW, None, format=f"axolotl:{own}"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()


def test_an_answer_that_ends_itself(tokenizers):
    """No second EOS is put behind one that the row writes; one within the prompt's text stays."""
    for tokenizer in tokenizers:
        row = {"instruction": f"a{tokenizer.eos_token}", "output": f"b{tokenizer.eos_token}"}
        made = convert("axolotl:alpaca:phi", "f:1", row, None)
        example = forge_data.tokenize(row, tokenizer, format="axolotl:alpaca:phi")
        assert (example.input_ids.tolist(), example.labels.tolist()) == axolotl(tokenizer, *made.texts)


@pytest.mark.parametrize("on_inputs", [False, True])
def test_segments(tokenizers, on_inputs):
    """Segments are tokenised one by one, with nothing around them (`prompt_strategies/input_output.py`)."""
    segments = [
        {"label": label, "text": text} for label, text in ((False, "<s>Hi "), (True, "you</s>"), (False, ""), (True, "a"))
    ]
    for tokenizer in tokenizers:
        ids, labels = [], []
        for segment in segments:
            own = tokenizer(segment["text"], add_special_tokens=False)["input_ids"]
            ids, labels = ids + own, labels + (own if segment["label"] or on_inputs else [-100] * len(own))
        train_on = "all" if on_inputs else "assistant"
        example = forge_data.tokenize({"segments": segments}, tokenizer, format="axolotl:input_output", train_on=train_on)
        assert (example.input_ids.tolist(), example.labels.tolist()) == (ids, labels)


def test_a_store(tokenizers, write_rows, tmp_path):
    """A file of such rows is prepared: roles, a row's weight, and what the lint says of an empty answer."""
    rows = [{"instruction": "a", "output": "b", "weight": 2.0}, {"instruction": "c", "input": "d", "output": "e"}]
    store = forge_data.prepare(write_rows(rows), tokenizers[0], tmp_path / "store", format="axolotl:alpaca")
    assert store[0].roles == ("prompt", "completion")
    assert set(store[0].weights[store[0].labels != -100].tolist()) == {2.0}
    made = convert("axolotl:alpaca", "f:1", rows[1], None)
    assert (store[1].input_ids.tolist(), store[1].labels.tolist()) == axolotl(tokenizers[0], *made.texts)
    report = forge_data.lint(write_rows([{"instruction": "a", "output": " "}]), tokenizers[0], format="axolotl:alpaca")
    assert [(each.rule, each.field) for each in report.findings] == [("empty_turn", "output")]


def test_an_end_that_is_not_learned(tokenizers, write_rows):
    """Of segments nothing but the row itself ends what is learned, and the lint looks whether it does."""
    for end, rules in (("", ["missing_eos"]), (tokenizers[0].eos_token, [])):
        rows = [{"segments": [{"label": False, "text": "ask me"}, {"label": True, "text": f"done{end}"}]}]
        report = forge_data.lint(write_rows(rows), tokenizers[0], format="axolotl:input_output")
        assert [each.rule for each in report.findings] == rules


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("alpaca", {"instruction": "a"}, "the format axolotl:alpaca needs instruction, output"),
        ("alpaca", {"instruction": "a", "output": 3}, "field output is int 3; it must be a string"),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
            "no place for earlier turns; choose the format alpaca",
        ),
        ("alpaca", {"instruction": "a", "output": "b", "system": "c"}, "field system is .*, which would be passed over"),
        ("explainchoice", {"question": "a", "explanation": "b", "choices": [1]}, r"field choices\[0\] is int 1"),
        ("input_output", {"segments": []}, "field segments is a list of 0; it must be a list of objects with text and label"),
        (
            "input_output",
            {"segments": [{"text": "a"}]},
            r"field segments\[0\] is .*; it must have a text, and a label true or false",
        ),
        ("input_output", {"segments": [{"text": 1, "label": True}]}, r"field segments\[0\].text is int 1"),
    ],
)
def test_refused(kind, row, message):
    """A row that cannot be read so is refused by its place, field and what to do."""
    with pytest.raises(DataError, match=f"f:1.*{message}"):
        convert(f"axolotl:{kind}", "f:1", row, None)


def test_segments_say_what_is_learned(tokenizers):
    """Labels of segments leave nothing for train_on=last to choose."""
    with pytest.raises(DataError, match="`train_on` is 'last', and the row holds segments"):
        row = {"segments": [{"label": True, "text": "a"}]}
        forge_data.tokenize(row, tokenizers[0], format="axolotl:input_output", train_on="last")


def test_chosen_by_name_alone():
    """Rows with Alpaca's fields are conversations unless the type is chosen; another name is refused with the nearest."""
    from forge_data.formats._registry import check_name, detect

    assert detect("f:1", {"instruction": "a", "output": "b"}) == "alpaca"
    with pytest.raises(DataError, match="axolotl:TYPE .*did you mean 'axolotl:alpaca_chat'"):
        check_name("axolotl:alpaca_chats")


def test_an_input_of_json():
    """An input that looks like a list or an object is text, as any other; of choices alone a string is read as a list."""
    for text in ('{"a": 1}', "[1, 2]"):
        made = convert("axolotl:alpaca", "f:1", {"instruction": "a", "input": text, "output": "b"}, None)
        assert f"### Input:\n{text}\n" in made.texts[0]
    made = convert("axolotl:concisechoice", "f:1", ROW_OF_CHOICE | {"choices": '["a"]'}, None)
    assert made == convert("axolotl:concisechoice", "f:1", ROW_OF_CHOICE, None)


def test_solution_of_a_choice():
    """A row's `solution` is read before its `explanation`, as in Axolotl."""
    made = convert("axolotl:concisechoice", "f:1", ROW_OF_CHOICE | {"solution": "b"}, None)
    assert made.texts[1] == "b"
    assert attrs.evolve(made, texts=()) == attrs.evolve(convert("axolotl:concisechoice", "f:1", ROW_OF_CHOICE, None), texts=())


ROW_OF_CHOICE = {"question": "Why?", "choices": ["a"], "explanation": "As a."}
