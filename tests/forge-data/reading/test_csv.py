"""CSV: cells are text as it is."""

import csv
import io

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
