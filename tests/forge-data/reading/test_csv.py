"""CSV: cells are text as it is."""

import csv
import io
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from forge_data import DataError
from forge_data.reading._csv import CsvFile
from forge_data.reading._file import DataFile


def source(tmp_path, text, delimiter=","):
    path = tmp_path / "train.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return CsvFile("train.csv", DataFile(str(path)), delimiter)


def rows(reader, size=1 << 20):
    return [(record.place, record.fields) for chunk in reader.chunks(size) for record in chunk.records()]


def test_rows(tmp_path):
    """A row is named by the line it begins in; a byte order mark and blank lines are skipped; quoted cells hold line ends."""
    text = '\ufeffprompt,completion\r\n"a\nb",c\r\n\r\n"say ""hi""",\r\n'
    assert rows(source(tmp_path, text), 1) == [
        ("train.csv:2", {"prompt": "a\nb", "completion": "c"}),
        ("train.csv:5", {"prompt": 'say "hi"', "completion": ""}),
    ]


@pytest.mark.parametrize("cell", ["None", "NA", "null", "nan", "007", "1.0", "True", " padded ", "1e5"])
def test_nothing_is_guessed(tmp_path, cell):
    """A cell that looks like a number or null stays text."""
    assert rows(source(tmp_path, f"prompt\tcompletion\nx\t{cell}\n", "\t")) == [
        ("train.csv:2", {"prompt": "x", "completion": cell})
    ]


def test_a_long_cell(tmp_path):
    """A cell may be longer than the csv module's own limit."""
    ((_, fields),) = rows(source(tmp_path, "text\n" + "x" * 300_000 + "\n"))
    assert len(fields["text"]) == 300_000


@given(values=st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]), max_size=9)] * 2), max_size=9))
def test_round_trip(tmp_path_factory, values):
    """What the csv module wrote comes back."""
    out = io.StringIO()
    csv.writer(out).writerows([("a", "b"), *values])
    got = rows(source(tmp_path_factory.mktemp("csv"), out.getvalue()), 20)
    assert [(fields["a"], fields["b"]) for _, fields in got] == values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n1\n", r"train.csv:3 has 1 cell, but the first line names 2 fields \(a, b\); put a cell"),
        ("a,b\n1,2,3\n", "train.csv:2 has 3 cells, but"),
        ("a,a\n1,2\n", "train.csv:1 names the field 'a' more than once"),
        ("a;b\n1;2\n", "train.csv:1 names one field, 'a;b'; cells must be delimited by ',', not by ';'"),
        ('a,b\n1,"2\n', "train.csv:2 is not valid CSV: unexpected end of data"),
        ('a,b\n1,"2"x\n', "train.csv:2 is not valid CSV"),
        (b"a,b\n1,\xff\n", "train.csv:2 is not UTF-8: byte 0xff at position 3 of the line"),
    ],
)
def test_faults(tmp_path, text, expected):
    """A line that cannot be read is named, and none is filled or cut."""
    with pytest.raises(DataError, match=expected):
        rows(source(tmp_path, text))


def carried_out(error, cwd):
    """Run the command that a message gives, in the directory of the file."""
    command = re.search(r"(python3 .*|iconv [^`]*)", str(error))[0].rstrip(")`")
    subprocess.run(["bash", "-c", command.replace("python3", sys.executable)], cwd=cwd, check=True)


@pytest.mark.parametrize(
    "text",
    ['a;b\n"1; 2, 3";"x ""y""\nz"\n', '\ufeff"a";"b"\r\n"1; 2, 3";"x ""y""\nz"\r\n', 'a|b\n1; 2, 3|"x ""y""\nz"\n'],
)
def test_another_delimiter_is_answered_with_a_command_that_works(tmp_path, text):
    """Semicolons, as spreadsheets write them in much of Europe; the command keeps quotes, line ends and letters."""
    with pytest.raises(DataError, match="cells must be delimited by ',', not by '") as raised:
        rows(source(tmp_path, text.replace("x", "ü")))
    carried_out(raised.value, tmp_path)
    ((_, fields),) = rows(source(tmp_path, (tmp_path / "train-commas.csv").read_bytes()))
    assert fields == {"a": "1; 2, 3", "b": 'ü "y"\nz'}


def test_tabs_in_a_csv_file(tmp_path):
    """The suffix says that cells are delimited by tabs."""
    with pytest.raises(DataError, match=r"not by '\\t'; name the file train.tsv$"):
        rows(source(tmp_path, "a\tb\n1\t2\n"))


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_another_encoding_is_answered_with_a_command_that_works(tmp_path, encoding):
    """Windows' code page, and what Excel calls Unicode text."""
    with pytest.raises(DataError, match="is not UTF-8: .*; save the file as UTF-8") as raised:
        rows(source(tmp_path, "a,b\n1,„für“\n".encode(encoding)))
    carried_out(raised.value, tmp_path)
    ((_, fields),) = rows(source(tmp_path, (tmp_path / "train-utf8.csv").read_bytes()))
    assert fields == {"a": "1", "b": "„für“"}
