"""Columns under other names: `rename_columns` wherever rows are read."""

import json

import pytest

from forge_data import DataError, DataSettings, lint, prepare, prepare_prompts, tokenize
from forge_data.cli import _parser

NAMES = {"question": "prompt", "answer": "completion"}
ROWS = [{"question": f"count to {n}", "answer": " ".join(map(str, range(n))) + " .", "id": n} for n in range(1, 9)]
PLAIN = [{NAMES.get(name, name): value for name, value in row.items()} for row in ROWS]


@pytest.fixture
def files(write_rows):
    """Rows with columns of other names, and the same rows with those that a format reads."""
    return write_rows(ROWS), write_rows(PLAIN, "plain.jsonl")


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_prepared_alike(files, chatml_tokenizer, tmp_path, workers):
    """Renamed rows become the samples that rows with these names become, in any number of processes."""
    other, plain = files
    made = prepare(other, chatml_tokenizer, tmp_path / "a", rename_columns=NAMES, num_proc=workers)
    assert made.fingerprint == prepare(plain, chatml_tokenizer, tmp_path / "b").fingerprint
    assert made.settings["rename_columns"] == NAMES


def test_everywhere(files, chatml_tokenizer, tmp_path):
    """tokenize, lint and prepare_prompts rename as prepare does."""
    other, plain = files
    one, same = tokenize(ROWS[0], chatml_tokenizer, rename_columns=NAMES), tokenize(PLAIN[0], chatml_tokenizer)
    assert one.labels.tolist() == same.labels.tolist()
    assert lint(other, chatml_tokenizer, rename_columns=NAMES).counts == lint(plain, chatml_tokenizer).counts
    asked = prepare_prompts(other, chatml_tokenizer, tmp_path / "prompts", rename_columns={"question": "prompt"})
    assert (asked[0].prompt, asked[0].columns) == ("count to 1", {"answer": "0 .", "id": 1})


@pytest.mark.slow
def test_after_preprocess(files, chatml_tokenizer, tmp_path):
    """The function gets the columns of the file; what it returns is renamed."""
    seen = []

    def shorter(row):
        seen.append(sorted(row))
        return {"query": row["question"], "answer": row["answer"]}

    names = {"query": "prompt", "answer": "completion"}
    made = prepare(files[0], chatml_tokenizer, tmp_path / "a", preprocess=shorter, rename_columns=names, num_proc=2)
    assert seen == [["answer", "id", "question"]] * len(ROWS)
    assert made.fingerprint == prepare(files[1], chatml_tokenizer, tmp_path / "b").fingerprint


def test_two_names_change_places(chatml_tokenizer):
    """Columns are renamed at once, so that two may change their names."""
    swapped = {"prompt": "a", "completion": "b"}
    made = tokenize(swapped, chatml_tokenizer, rename_columns={"prompt": "completion", "completion": "prompt"})
    assert made.input_ids.tolist() == tokenize({"prompt": "b", "completion": "a"}, chatml_tokenizer).input_ids.tolist()


@pytest.mark.parametrize("names", [("Question", "Answer"), ("PROMPT", "COMPLETION"), (" question", "answer ")])
def test_columns_in_capitals_are_offered_as_they_are(chatml_tokenizer, names):
    """What the message proposes are the row's own names."""
    with pytest.raises(DataError, match=f"such as {names[0]}=instruction {names[1]}=output"):
        tokenize(dict.fromkeys(names, "a"), chatml_tokenizer)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"question": "prompt", "answer": "prompt"}, r"train.jsonl:1 has the columns 'question' and 'answer', and `rename_co"),
        ({"question": "answer"}, r"train.jsonl:1 has the columns 'question' and 'answer', and .* would name both 'answer'"),
        (NAMES | {"qestion": "text"}, r"`rename_columns` names the column 'qestion', which no row has; did you mean 'question"),
        (
            {},
            r"which are no known format; .* give them with `rename_columns`, such as question=instruction answer=output "
            r"\(asked and answered in the chat template\) or question=prompt answer=completion \(text as it stands\)",
        ),
        ("prompt", "`rename_columns` is the string 'prompt'; it must be a mapping"),
        ({"question": 3}, "`rename_columns` holds int 3"),
    ],
)
def test_refused(files, chatml_tokenizer, tmp_path, names, message):
    """Two columns of one name, and a column that no row has, are errors that name them; nothing is left behind."""
    with pytest.raises(DataError, match=message):
        prepare(files[0], chatml_tokenizer, tmp_path / "store", rename_columns=names)
    assert not (tmp_path / "store").exists()


def test_prompts_are_no_rows_inside_a_field(write_rows, chatml_tokenizer, tmp_path):
    """A prompt of messages was said to hold the rows, with a jq command that would have torn it apart."""
    rows = write_rows([{"prompt": [{"role": "user", "content": "a"}], "fruit": "pear"}], "prompts.jsonl")
    with pytest.raises(DataError, match="a prompt without an answer is for .*--prompts") as caught:
        prepare(rows, chatml_tokenizer, tmp_path / "store")
    assert "jq" not in str(caught.value)


def test_files_with_other_columns(write_rows, chatml_tokenizer, tmp_path):
    """Columns of several files may get one name, as long as no row has two of them."""
    paths = [write_rows(ROWS, "a.jsonl"), write_rows([{"query": "x", "answer": "y"}], "b.jsonl")]
    store = prepare(paths, chatml_tokenizer, tmp_path / "store", rename_columns=NAMES | {"query": "prompt"})
    assert store.accounting.kept == len(ROWS) + 1


def test_the_verbs(files, chatml_tokenizer, tmp_path, capsys):
    """In a shell each column is COLUMN=NAME, and messages name the flag."""
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    words = ["lint", str(files[0]), "--tokenizer", str(tmp_path / "model"), "--json"]
    assert _parser.main(words) == 1
    finding = json.loads(capsys.readouterr().out)["findings"][0]
    assert "give them with `rename_columns`, such as question=instruction answer=output" in finding["fix"]
    assert _parser.main([*words, "--rename-columns", "question=prompt", "answer=completion"]) == 0
    capsys.readouterr()
    assert _parser.main([*words, "--rename-columns", "question"]) == 2
    assert "--rename-columns holds 'question'; write COLUMN=NAME" in capsys.readouterr().err


@pytest.mark.parametrize("value", [{}, {"a": ""}, {"": "a"}, {"a": 1}, ["a"]])
def test_settings(value):
    """The setting is a mapping of names to names."""
    assert DataSettings(data_path="a", rename_columns=NAMES).rename_columns == NAMES
    with pytest.raises((TypeError, ValueError), match="rename_columns must"):
        DataSettings(data_path="a", rename_columns=value)
