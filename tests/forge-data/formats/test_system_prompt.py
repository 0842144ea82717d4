"""A row that is given `system_prompt` is the row that was written with that message."""

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from forge_data import (
    DataError,
    DataSettings,
    TemplateError,
    lint,
    prepare,
    prepare_labelled,
    prepare_prompts,
    prepare_taught,
    tokenize,
)
from forge_data._options import Options

PROMPT = "Answer in one word."
SYSTEM = {"role": "system", "content": PROMPT}
TEXT = st.text("abc .!", min_size=1, max_size=6).filter(str.strip)
TURNS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3)


def _messages(turns):
    return [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]


def _trained(turns, trains):
    return [{**m, "train": trains} if m["role"] == "assistant" and at == 1 else m for at, m in enumerate(_messages(turns))]


def _sharegpt(turns):
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in _messages(turns)]


FORMS = {
    "messages": lambda turns: ({"messages": _messages(turns)}, {"messages": [SYSTEM, *_messages(turns)]}),
    "weighted": lambda turns: (
        {"messages": _trained([*turns, ("q", "a")], False)},
        {"messages": [SYSTEM, *_trained([*turns, ("q", "a")], False)]},
    ),
    "prompt and completion": lambda turns: (
        {"prompt": _messages(turns)[:-1], "completion": _messages(turns)[-1:]},
        {"prompt": [SYSTEM, *_messages(turns)[:-1]], "completion": _messages(turns)[-1:]},
    ),
    "sharegpt": lambda turns: ({"conversations": _sharegpt(turns)}, {"conversations": _sharegpt(turns), "system": PROMPT}),
    "alpaca": lambda turns: tuple(
        {
            "instruction": turns[-1][0],
            "output": turns[-1][1],
            "history": [list(turn) for turn in turns[:-1]],
            **system,
        }
        for system in ({}, {"system": PROMPT})
    ),
    "ms_swift": lambda turns: tuple(
        {"query": turns[-1][0], "response": turns[-1][1], "history": [list(turn) for turn in turns[:-1]], **system}
        for system in ({}, {"system": PROMPT})
    ),
}


def _rows_of(store):
    return [(store[i].input_ids.tolist(), store[i].labels.tolist(), store[i].roles) for i in range(len(store))]


@pytest.mark.parametrize("form", FORMS)
@given(turns=TURNS, train_on=st.sampled_from(["assistant", "last", "all", "assistant,user"]))
@settings(max_examples=30)
def test_ids_and_labels_are_those_of_rows_written_with_it(form, turns, train_on, chatml_tokenizer):
    """In every format and for everything that may be learned."""
    assume(form != "weighted" or train_on != "all")  # refused, with the message and without
    bare, written = FORMS[form](turns)
    found = tokenize(bare, chatml_tokenizer, train_on=train_on, system_prompt=PROMPT)
    expected = tokenize(written, chatml_tokenizer, train_on=train_on)
    assert np.array_equal(found.input_ids, expected.input_ids)
    assert np.array_equal(found.labels, expected.labels)
    assert found.roles == expected.roles


PAIR = {"chosen": [{"role": "assistant", "content": "yes"}], "rejected": [{"role": "assistant", "content": "no"}]}
ASKED = [{"role": "user", "content": "is it?"}]


@pytest.mark.parametrize(
    ("bare", "written"),
    [
        ({"prompt": ASKED, **PAIR}, {"prompt": [SYSTEM, *ASKED], **PAIR}),
        (
            {name: [*ASKED, *side] for name, side in PAIR.items()},
            {name: [SYSTEM, *ASKED, *side] for name, side in PAIR.items()},
        ),
        (
            {"prompt": ASKED, "completion": PAIR["chosen"], "label": True},
            {"prompt": [SYSTEM, *ASKED], "completion": PAIR["chosen"], "label": True},
        ),
        (
            {"query": "is it?", "response": "yes", "rejected_response": "no"},
            {"query": "is it?", "response": "yes", "rejected_response": "no", "system": PROMPT},
        ),
    ],
)
def test_preferences_and_ratings_are_those_written_with_it(bare, written, chatml_tokenizer, tmp_path):
    """Both sides of a pair have it, and so has a rated answer."""
    found = prepare([bare], chatml_tokenizer, tmp_path / "a", system_prompt=PROMPT)
    assert _rows_of(found) == _rows_of(prepare([written], chatml_tokenizer, tmp_path / "b"))
    assert found.accounting.forms == {"with_system_prompt": 1}


def test_a_message_of_its_own_stays(chatml_tokenizer, tmp_path):
    """A row that has one, of the system or of a developer, is as it was, and both are counted."""
    own = {"messages": [{"role": "system", "content": "rhyme"}, *_messages([("a", "b")])]}
    bare = {"messages": _messages([("a", "b")])}
    found = prepare([own, bare], chatml_tokenizer, tmp_path / "a", system_prompt=PROMPT)
    written = prepare([own, {"messages": [SYSTEM, *bare["messages"]]}], chatml_tokenizer, tmp_path / "b")
    assert _rows_of(found) == _rows_of(written)
    assert found.accounting.forms == {"with_system_prompt": 1, "with_own_system_message": 1}
    developer = {"messages": [{"role": "developer", "content": "rhyme"}, *_messages([("a", "b")])]}
    plain = tokenize(developer, chatml_tokenizer)
    assert np.array_equal(tokenize(developer, chatml_tokenizer, system_prompt=PROMPT).input_ids, plain.input_ids)


def test_prompts_and_labelled_messages_are_those_written_with_it(chatml_tokenizer, tmp_path):
    """The prompt that rewards and teachers read has it; a prompt that is text stays as it is."""
    rows = [{"prompt": ASKED, "answer": "yes"}, {"prompt": "is it?", "answer": "yes"}]
    written = [{"prompt": [SYSTEM, *ASKED], "answer": "yes"}, rows[1]]
    found = prepare_prompts(rows, chatml_tokenizer, tmp_path / "a", system_prompt=PROMPT)
    expected = prepare_prompts(written, chatml_tokenizer, tmp_path / "b")
    for i in range(2):
        assert np.array_equal(found[i].input_ids, expected[i].input_ids)
        assert (found[i].prompt, found[i].columns) == (expected[i].prompt, expected[i].columns)
    rows = [{"messages": ASKED, "label": "yes"}]
    found = prepare_labelled(rows, chatml_tokenizer, tmp_path / "c", system_prompt=PROMPT)
    expected = prepare_labelled([{"messages": [SYSTEM, *ASKED], "label": "yes"}], chatml_tokenizer, tmp_path / "d")
    assert np.array_equal(found[0].input_ids, expected[0].input_ids)


def test_a_teacher_is_given_it_too(chatml_tokenizer, qwen3, tmp_path):
    """Both tokenizers write the message, each in its own template."""
    rows = [{"messages": _messages([("what is it", "it is a plum")])}]
    found = prepare_taught(rows, chatml_tokenizer, qwen3, tmp_path / "a", system_prompt=PROMPT)
    written = [{"messages": [SYSTEM, *rows[0]["messages"]]}]
    expected = prepare_taught(written, chatml_tokenizer, qwen3, tmp_path / "b")
    assert _rows_of(found) == _rows_of(expected)
    for one, other in zip(found.taught(0), expected.taught(0), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("make", "row"),
    [
        (prepare, {"prompt": "a", "completion": "b"}),
        (prepare, {"input_ids": [1, 2], "labels": [1, 2]}),
        (prepare_prompts, {"prompt": "a"}),
        (prepare_labelled, {"text": "a", "label": "b"}),
    ],
)
def test_rows_of_text_alone_are_refused(make, row, chatml_tokenizer, tmp_path):
    """A setting that changes nothing is an error, and nothing is written."""
    with pytest.raises(DataError, match="`system_prompt` has no effect: .*make the rows messages, or leave it out"):
        make([row], chatml_tokenizer, tmp_path / "store", system_prompt=PROMPT)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("make", "row"),
    [
        (prepare, {"messages": _messages([("a", "b")])}),
        (prepare_prompts, {"prompt": ASKED}),
        (prepare_labelled, {"messages": ASKED, "label": "b"}),
    ],
)
def test_a_template_that_leaves_it_out_is_refused(make, row, chatml_tokenizer, tmp_path):
    """The rows would be learned without it, and the model asked with it."""
    file = tmp_path / "without.jinja"
    each = "{% for m in messages %}"
    assert each in chatml_tokenizer.chat_template
    template = chatml_tokenizer.chat_template.replace(each, "{% for m in messages if m['role'] != 'system' %}")
    file.write_text(template, encoding="utf-8")
    with pytest.raises(TemplateError, match="does not write"):
        make([row], chatml_tokenizer, tmp_path / "store", chat_template=file, system_prompt=PROMPT)


def test_a_store_is_made_anew_for_another_one(chatml_tokenizer, write_rows, tmp_path):
    """The message is part of the fingerprint; without one it is what it was before there was the setting."""
    rows = write_rows([{"messages": _messages([("a", "b")])}])
    stores = [prepare(rows, chatml_tokenizer, tmp_path / "s", system_prompt=text) for text in (None, "a", "b", "b")]
    inputs = [store.inputs for store in stores]
    assert len(set(inputs)) == 3
    assert inputs[2] == inputs[3]


def test_findings_name_the_fields_of_the_row(chatml_tokenizer):
    """Messages keep their numbers, and a fault of the message itself is of the setting."""
    rows = [{"messages": [{"role": "user", "content": "caf\ufffd"}, {"role": "assistant", "content": "b"}]}]
    (found,) = lint(rows, chatml_tokenizer, system_prompt=PROMPT).findings
    assert found.field == "messages[0].content"
    fields = {each.field for each in lint(rows, chatml_tokenizer, system_prompt="caf\ufffd").findings}
    assert fields == {"messages[0].content", "system_prompt"}


def test_a_text_is_read_from_a_file(tmp_path):
    """By settings and arguments alike, without the line break at its end."""
    file = tmp_path / "system.txt"
    file.write_text(f"{PROMPT}\nBe kind.\n", encoding="utf-8")
    for made in (DataSettings(data_path="x", system_prompt=f"file:{file}"), Options(system_prompt=f"file:{file}")):
        assert made.system_prompt == f"{PROMPT}\nBe kind."


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("caf\ud800", "is not UTF-8"),
        ("file:/nowhere/at/all.txt", "names the file '/nowhere/at/all.txt', which cannot be read: No such file"),
    ],
)
def test_what_is_no_message_is_refused(given, said):
    """By name, as a setting and as an argument."""
    with pytest.raises(ValueError, match=f"system_prompt {said}"):
        DataSettings(data_path="x", system_prompt=given)
    with pytest.raises(DataError, match=f"`system_prompt` {said}"):
        Options(system_prompt=given)
    with pytest.raises(TypeError, match="system_prompt must be a text"):
        DataSettings(data_path="x", system_prompt=3)


def test_files_that_hold_no_message_are_refused(tmp_path):
    """Bytes that are no text, and a text that would be read as the name of a file."""
    for content, said in ((b"\xff\xfe", "it is not UTF-8"), (b"file:x", "begins with file:")):
        (tmp_path / "s").write_bytes(content)
        with pytest.raises(ValueError, match=said):
            DataSettings(data_path="x", system_prompt=f"file:{tmp_path / 's'}")


def test_the_command_line_gives_it(chatml_tokenizer, write_rows, tmp_path, capsys):
    """`forge data prepare --system-prompt TEXT`; errors name the flag."""
    from forge_data.cli._parser import main

    directory = tmp_path / "tokenizer"
    chatml_tokenizer.save_pretrained(directory)
    rows = write_rows([{"prompt": "a", "completion": "b"}])
    words = ["prepare", str(rows), "--tokenizer", str(directory), "--store-dir", str(tmp_path / "s"), "--quiet"]
    assert main([*words, "--system-prompt", PROMPT]) == 2
    assert "--system-prompt has no effect" in capsys.readouterr().err
    rows.write_text(json.dumps({"messages": _messages([("a", "b")])}), encoding="utf-8")
    assert main([*words, "--system-prompt", PROMPT]) == 0
