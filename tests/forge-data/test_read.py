"""A path to rows: which reader, and what is no file of rows."""

import errno
import os
from pathlib import Path

import pytest

from forge_data import DataError
from forge_data._read import open_source, read


def test_no_file(tmp_path):
    """A path where nothing is names the path and where it was looked for."""
    with pytest.raises(DataError, match=r"no file at '.*nothing.jsonl' \(looked from"):
        open_source(str(tmp_path / "nothing.jsonl"))


def test_directory(tmp_path):
    """A directory is not read file by file."""
    with pytest.raises(DataError, match="is a directory; give one file"):
        open_source(str(tmp_path))


def test_a_name_that_is_too_long():
    """What the system says of a path is a fault of the path."""
    with pytest.raises(DataError, match="x{300}.jsonl cannot be read: File name too long"):
        open_source("x" * 300 + ".jsonl")


def test_a_directory_that_may_not_be_entered(tmp_path, monkeypatch):
    """A path that may not be looked at is refused with the reason."""

    def refuse(self, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(DataError, match="private/rows.jsonl cannot be read: Permission denied"):
        open_source(str(tmp_path / "private" / "rows.jsonl"))


@pytest.mark.parametrize("path", ["~no-such-user-here/rows.jsonl", "rows\0.jsonl"])
def test_no_path(path):
    """What cannot be a path at all is refused as one."""
    with pytest.raises(DataError, match="is no path to a file: "):
        open_source(path)


def test_no_regular_file(tmp_path):
    """A pipe, a device and a link to itself are there, but are no files of rows; none of them is opened."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    for path, said in [
        (tmp_path / "pipe.jsonl", "is not a regular file but a named pipe; write the rows to a file"),
        (tmp_path / "loop.jsonl", "is not a regular file but a loop of symbolic links"),
        (tmp_path / "gone.jsonl", "no file at"),
        (Path(os.devnull), "is not a regular file but a device"),
    ]:
        with pytest.raises(DataError, match=said):
            open_source(str(path))


def test_suffix(tmp_path):
    """A suffix that no reader has is refused with those that there are."""
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"not known \(.csv\); known: .json, .jsonl, .ndjson, .parquet"):
        open_source(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_empty(tmp_path, name):
    """An empty file is said to be empty."""
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="is empty: it holds no rows"):
        open_source(str(tmp_path / name))


def test_blank(tmp_path):
    """A file of blank lines holds no rows."""
    (tmp_path / "rows.jsonl").write_text("\n  \n\n")
    with pytest.raises(DataError, match="rows.jsonl holds no rows"):
        list(read(open_source(str(tmp_path / "rows.jsonl"))))


@pytest.mark.parametrize(
    ("line", "found"), [("[1, 2]", "a list of 2"), ('"hi"', "the string 'hi'"), ("null", "null"), ("3", "int 3")]
)
def test_no_object(write_rows, line, found):
    """A line that is JSON but no object is named, with what it is."""
    path = write_rows(['{"a": 1}', "", line])
    with pytest.raises(DataError, match=rf"train.jsonl:3 is not an object but {found}".replace("[", r"\[")):
        list(read(open_source(str(path))))


def test_null_is_absent(write_rows):
    """A field that is null counts as not there, as in a Parquet file, where every row has every column."""
    (record,) = read(open_source(str(write_rows(['{"a": null, "b": 0}']))))
    assert record.fields == {"b": 0}
