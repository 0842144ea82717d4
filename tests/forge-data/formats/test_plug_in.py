"""A format of another package: added by an entry point, detected or chosen, prepared, linted, shown, and known to the
settings."""

import importlib.metadata
import sys

import numpy as np
import pytest

from forge_data import DataError, DataSettings, Format, PreferenceDataSettings, TokenStore, lint, prepare, show, tokenize
from forge_data.cli import _parser
from forge_data.formats import _registry

TOY = """
from forge_data import DataError, Format


def _convert(place, row):
    if not isinstance(row["question"], str):
        raise DataError(f"{place}: field question must be a string")
    if row["answer"] == "boom":
        raise ValueError("cannot read this")
    if row["answer"] == "nothing":
        return None
    return {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]}


QUESTIONS = Format(
    needs="question, answer",
    matches=lambda row: "question" in row and "answer" in row,
    convert=_convert,
    field_of=lambda row, index, part, answer: ("question", "answer")[index],
)
"""
ROWS = [{"question": f"What is {n}?", "answer": f"{n} it is"} for n in range(6)]
AS_MESSAGES = [
    {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]}
    for row in ROWS
]


def forget():
    """Forget which formats were loaded."""
    for cached in (_registry.formats, _registry.format_named, _registry._refused):
        cached.cache_clear()
    sys.modules.pop("toy_format", None)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a package with one format: its name, what the entry point names, and the module's source."""
    site = tmp_path / "site"

    def installed(name="questions", where="toy_format:QUESTIONS", source=TOY):
        information = site / "toy_format-1.0.dist-info"
        information.mkdir(parents=True, exist_ok=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-format\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[forge.formats]\n{name} = {where}\n")
        (site / "toy_format.py").write_text(source)
        forget()

    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield installed
    forget()


def tokens(store):
    return [(store[index].input_ids.tolist(), store[index].labels.tolist()) for index in range(len(store))]


@pytest.mark.parametrize("format_", ["auto", "questions"])
def test_detected_or_chosen(install, write_rows, chatml_tokenizer, tmp_path, format_):
    """Rows of the new format become the tokens of the messages that it rewrites them to; the store names the format."""
    install()
    store = prepare(write_rows(ROWS), chatml_tokenizer, tmp_path / "store", format=format_)
    expected = prepare(write_rows(AS_MESSAGES, "messages.jsonl"), chatml_tokenizer, tmp_path / "expected")
    assert tokens(store) == tokens(expected)
    assert store.settings["format"] == "questions"
    one = tokenize(ROWS[0], chatml_tokenizer, format=format_)
    assert np.array_equal(one.labels, store[0].labels)


@pytest.mark.slow
def test_in_worker_processes(install, write_rows, chatml_tokenizer, tmp_path):
    """Workers know the format too."""
    install()
    rows = write_rows(ROWS)
    alone, many = (prepare(rows, chatml_tokenizer, tmp_path / f"{n}", num_proc=n) for n in (1, 2))
    assert many.fingerprint == alone.fingerprint


def test_linted_and_shown(install, write_rows, chatml_tokenizer, tmp_path, capsys):
    """Findings name the row's own fields; the rows can be shown; the command line takes the format's name."""
    install()
    path = write_rows([*ROWS, {"question": "caf\ufffd?", "answer": "so"}])
    report = lint(path, chatml_tokenizer)
    assert [(each.place, each.field) for each in report.findings if each.rule == "broken_unicode"] == [
        ("train.jsonl:7", "question")
    ]
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    words = [str(path), "--tokenizer", str(tmp_path / "model"), "--format", "questions"]
    assert _parser.main(["prepare", *words, "--store-dir", str(tmp_path / "store"), "--quiet"]) == 0
    assert _parser.main(["lint", *words]) == 0
    capsys.readouterr()
    show(TokenStore.open(tmp_path / "store"), 2)
    out = capsys.readouterr().out
    assert "train.jsonl:3 · sample 2" in out
    assert "2·it·is" in out


def test_settings_accept_it(install):
    """Settings accept the name where the package is installed, and refuse it, naming what there is, where it is not."""
    for settings in (DataSettings, PreferenceDataSettings):
        with pytest.raises(ValueError, match="data_format is 'questions'; allowed: auto, messages, .*document, axolotl:TYPE"):
            settings(data_path="x", data_format="questions")
    install()
    for settings in (DataSettings, PreferenceDataSettings):
        assert settings(data_path="x", data_format="questions").data_format == "questions"
    with pytest.raises(
        ValueError, match="data_format is 'question'; allowed: .*document, .*, questions; did you mean 'questions'"
    ):
        DataSettings(data_path="x", data_format="question")


def test_built_in_names_ask_no_package(monkeypatch):
    """For a built-in name the settings look at no installed package."""

    def asked(**_):
        raise AssertionError("entry points were read")

    monkeypatch.setattr(importlib.metadata, "entry_points", asked)
    assert DataSettings(data_path="x", data_format="alpaca").data_format == "alpaca"
    assert DataSettings(data_path="x").data_format == "auto"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": 3, "answer": "so"}, "train.jsonl:1: field question must be a string"),
        ({"question": "why", "answer": "boom"}, "train.jsonl:1: the format questions raised ValueError: cannot read this"),
        (
            {"question": "why", "answer": "nothing"},
            "train.jsonl:1: the format questions returned null; it must return the fields",
        ),
        ({"question": "why", "answer": 3}, r"train.jsonl:1: field messages\[1\].content is int 3; it must be a string"),
    ],
)
def test_a_row_that_it_cannot_read(install, write_rows, chatml_tokenizer, tmp_path, row, message):
    """Whatever goes wrong in another package's code names the row; what it returns is checked as built-in rows are."""
    install()
    with pytest.raises(DataError, match=message):
        prepare(write_rows([row]), chatml_tokenizer, tmp_path / "store")


def test_rewritten_to_no_format(install, write_rows, chatml_tokenizer, tmp_path):
    """Fields of no built-in format are refused, and so are those of the format itself: there is no endless rewriting."""
    install(source=TOY.replace('return {"messages": [{', 'return row or {"messages": [{'))
    with pytest.raises(
        DataError, match="train.jsonl:1, rewritten by the format questions, has the fields 'question', 'answer'"
    ):
        prepare(write_rows(ROWS), chatml_tokenizer, tmp_path / "store")


@pytest.mark.parametrize("name", ["messages", "auto"])
def test_a_name_that_is_taken(install, write_rows, chatml_tokenizer, tmp_path, name):
    """A package that is merely installed replaces no format."""
    install(name=name)
    with pytest.warns(RuntimeWarning, match=f"the entry point {name} = toy_format:QUESTIONS is ignored: that name is taken"):
        store = prepare(write_rows(AS_MESSAGES), chatml_tokenizer, tmp_path / "store")
    assert store.settings["format"] == "messages"


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"where": "toy_format:NOTHING"}, "could not be loaded"),
        ({"source": "raise OSError('no licence')"}, "could not be loaded: no licence"),
        ({"source": "QUESTIONS = 3"}, "is int 3 and no forge_data.Format"),
    ],
)
def test_one_that_cannot_be_loaded(install, write_rows, chatml_tokenizer, tmp_path, broken, why):
    """It is left out with a warning where nobody chose it, and refused where somebody did."""
    install(**broken)
    with pytest.warns(RuntimeWarning, match=f"{why}.* Going on without it"):
        prepare(write_rows(AS_MESSAGES), chatml_tokenizer, tmp_path / "store")
    with pytest.raises(DataError, match=f"`format` 'questions': .*{why}"):
        prepare(write_rows(ROWS, "questions.jsonl"), chatml_tokenizer, tmp_path / "other", format="questions")


def test_a_new_version_prepares_anew(install, write_rows, chatml_tokenizer, tmp_path):
    """A store is used again while the format's file is the same, and made anew once it differs."""
    install()
    rows = write_rows(ROWS)
    first, again = (prepare(rows, chatml_tokenizer, tmp_path / "store") for _ in range(2))
    assert again.inputs == first.inputs
    install(source=TOY.replace('row["answer"]}]}', 'row["answer"].upper()}]}'))
    changed = prepare(rows, chatml_tokenizer, tmp_path / "store")
    assert changed.inputs != first.inputs
    assert tokens(changed) != tokens(first)


def test_findings_without_field_names():
    """A format that names no fields lets findings name the row alone."""
    plain = Format(needs="a", matches=lambda row: "a" in row, convert=lambda place, row: {"text": row["a"]})
    assert plain.field_of({"a": "x"}, 0, "content", "completion") == ""


def test_rows_of_two_formats(install, write_rows, chatml_tokenizer, tmp_path):
    """A row that fits it and a built-in format is never guessed at."""
    install()
    both = ROWS[0] | AS_MESSAGES[0]
    with pytest.raises(DataError, match="fit more than one format: messages and questions"):
        prepare(write_rows([both]), chatml_tokenizer, tmp_path / "store")
