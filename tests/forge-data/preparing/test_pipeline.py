"""Chunks to workers and back: first refused row, number of processes, formats of a mixed file."""

import json
from pathlib import Path

import pytest

from forge_data import DataError, prepare
from forge_data.preparing import _pipeline
from forge_data.preparing._job import Task
from forge_data.preparing._pipeline import _cores, _processes


class Chunk:
    """A chunk of some size."""

    def __init__(self, size):
        self.size = size


def tasks(*sizes):
    return (Task(0, "a", False, Chunk(size)) for size in sizes)


@pytest.mark.parametrize(("sizes", "expected"), [((1, 2), None), ((), None), ((8 << 20,), 4), ((1, 8 << 20, 5, 7), 4)])
def test_processes_by_size(monkeypatch, sizes, expected):
    """Little data starts no second process, and measuring it loses no task and changes no order."""
    monkeypatch.setattr(_pipeline, "_cores", lambda: 4)
    count, found = _processes(tasks(*sizes), None)
    assert count == expected
    assert [task.chunk.size for task in found] == list(sizes)
    assert _processes(tasks(1), 7)[0] == 7


def test_processes_by_machine(monkeypatch):
    """One core is one process; a large machine is not filled by default."""
    for cores, expected in ((1, 1), (200, 16)):
        monkeypatch.setattr(_pipeline, "_cores", lambda cores=cores: cores)
        assert _processes(tasks(9 << 20), None)[0] == expected


@pytest.mark.parametrize(("message", "expected"), [("400000 100000", 4), ("50000 100000", 1), ("max 100000", 64), (None, 64)])
def test_cores_of_a_container(monkeypatch, message, expected):
    """A container's share of processor time limits the number of processes."""
    monkeypatch.setattr(_pipeline.os, "sched_getaffinity", lambda _: range(64), raising=False)

    def read(path, encoding):
        if message is None:
            raise FileNotFoundError(path)
        return message

    monkeypatch.setattr(Path, "read_text", read)
    assert _cores() == expected


TEXT = {"text": "some words"}
PAIR = {"prompt": "a", "completion": "b"}
PREFERRED = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (([TEXT, TEXT, PAIR],), r"a.jsonl:3 is a row of prompt_completion, but a.jsonl:1 is one of text"),
        (([TEXT], [PAIR, TEXT]), r"b.jsonl:2 is a row of text, but b.jsonl:1 is one of prompt_completion"),
        (([TEXT], [TEXT, PREFERRED]), r"b.jsonl:2 (is a row of preference|becomes preference samples)"),
        (([TEXT], [PREFERRED, TEXT]), r"b.jsonl:1 becomes preference samples and a.jsonl:1 supervised samples"),
        (([TEXT, {"text": 1}, PAIR],), r"a.jsonl:2: field text"),
        (([TEXT, PAIR, {"text": 1}],), r"a.jsonl:2 is a row of prompt_completion"),
        (([TEXT, PAIR, "{broken"],), r"a.jsonl:2 is a row of prompt_completion"),
        (([TEXT, "{broken", PAIR],), r"a.jsonl:2 is not valid JSON"),
        (([TEXT], [{"prompt": 1, "completion": 2}]), r"b.jsonl:1: prompt is int 1"),
    ],
)
def test_the_first_fault_counts(write_rows, chatml_tokenizer, tmp_path, monkeypatch, size, files, message):
    """Of mixed formats and broken rows the first in the files is reported, for any chunk size."""
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", size)
    paths = [write_rows(rows, f"{name}.jsonl") for name, rows in zip("ab", files, strict=False)]
    with pytest.raises(DataError, match=message):
        prepare(paths, chatml_tokenizer, tmp_path / "store")


def test_what_a_mixed_file_holds(write_rows, chatml_tokenizer, tmp_path):
    """A mixed file is an error that counts its formats, rows of none too."""
    rows = [TEXT, TEXT, PAIR, TEXT, {"words": 1}]
    with pytest.raises(DataError) as caught:
        prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store")
    assert str(caught.value) == (
        "train.jsonl:3 is a row of prompt_completion, but train.jsonl:1 is one of text; the first 5 rows are 3 of text (the "
        "first is train.jsonl:1), 1 of prompt_completion (the first is train.jsonl:3), 1 of no known format (the first is "
        "train.jsonl:5); a file holds one format, so that no stray row is learned otherwise than it was meant: put them into "
        "files of their own, make them one format with `preprocess`, or leave out all but one format: "
        "`format` text with on_bad_row=skip"
    )
    kept = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store", format="text", on_bad_row="skip", max_bad_rows=0.5)
    assert (kept.accounting.read, kept.accounting.kept) == (5, 3)


def test_a_format_that_is_said_is_not_looked_for(write_rows, chatml_tokenizer, tmp_path):
    """With a chosen format the same file is refused at the first row that lacks its fields."""
    with pytest.raises(DataError, match="train.jsonl:2 has the fields 'prompt', 'completion', but the format text needs"):
        prepare(write_rows([TEXT, PAIR]), chatml_tokenizer, tmp_path / "store", format="text")


def test_a_file_that_breaks_off(write_rows, chatml_tokenizer, tmp_path):
    """A refused row in the first file counts before a second file that cannot be read at all."""
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    first = write_rows([TEXT, {"text": 1}], "a.jsonl")
    with pytest.raises(DataError, match="a.jsonl:2: field text"):
        prepare([first, tmp_path / "b.jsonl.gz"], chatml_tokenizer, tmp_path / "store")


def test_settings_are_written_down(write_rows, chatml_tokenizer, tmp_path):
    """The store records its settings, with the format that was detected."""
    store = prepare(write_rows([TEXT]), chatml_tokenizer, tmp_path / "store", seed=3)
    message = json.loads((store.path / "store.json").read_text())["settings"]
    assert store.settings == message
    assert (message["format"], message["train_on"], message["on_overflow"], message["seed"]) == ("text", "assistant", "drop", 3)
