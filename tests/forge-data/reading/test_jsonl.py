"""JSONL: every error has its line, and chunks leave no trace."""

import gzip
import itertools
import json
import pickle
import re

import pytest
from hypothesis import given, strategies as st

from forge_data import DataError
from forge_data.reading._file import DataFile
from forge_data.reading._jsonl import FileLines, JsonLines, Lines


def source(tmp_path, data, name="train.jsonl"):
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return JsonLines("train.jsonl", DataFile(str(path)))


def rows(reader, size=1 << 20, refused=None):
    """Return (row, fields) of every record, each chunk pickled as between processes."""
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in reader.chunks(size)]
    return [(record.row, record.fields) for chunk in chunks for record in chunk.records(refused)]


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines(tmp_path, end, mark, name):
    """Blank lines are skipped and counted, a byte order mark and either line end are fine, the last line needs none."""
    data = mark + end.join([b'{"a": 1}', b"", b"  ", '{"a": "é"}'.encode(), b'{"a": 3}'])
    assert rows(source(tmp_path, data, name)) == [(1, {"a": 1}), (4, {"a": "é"}), (5, {"a": 3})]


def test_null_is_absent(tmp_path):
    """A null field of the row counts as absent, as in a table; within a field a null stays."""
    (row,) = rows(source(tmp_path, b'{"a": null, "b": 0, "c": {"d": null}}'))
    assert row == (1, {"b": 0, "c": {"d": None}})


def test_separators_within_a_string(tmp_path):
    """Unicode's line separators end no line of JSONL."""
    assert rows(source(tmp_path, '{"a": "x\u2028y\x85z"}\n'.encode())) == [(1, {"a": "x\u2028y\x85z"})]


@given(lines=st.lists(st.integers(0, 40) | st.none(), max_size=25), size=st.integers(1, 90), final=st.booleans())
def test_chunks_leave_no_trace(tmp_path_factory, lines, size, final):
    """For any chunk size the rows and their numbers are the file's; local chunks are offsets, others bytes."""
    folder = tmp_path_factory.mktemp("chunks")
    data = "\n".join("" if n is None else json.dumps({"a": "x" * n}) for n in lines) + "\n" * final
    expected = [(i, {"a": "x" * n}) for i, n in enumerate(lines, start=1) if n is not None]
    for name, kind in (("train.jsonl", FileLines), ("train.jsonl.gz", Lines)):
        reader = source(folder, data.encode(), name)
        assert rows(reader, size) == expected
        chunks = list(reader.chunks(size))
        assert all(type(chunk) is kind for chunk in chunks)
        numbers = [row for row, _ in expected]
        assert all(chunk.first_row <= chunk.last_row < after.first_row for chunk, after in itertools.pairwise(chunks))
        assert not numbers or chunks[-1].last_row >= numbers[-1]


def test_a_chunk_of_a_local_file_is_small(tmp_path):
    """A worker gets an offset of a local file, not its bytes."""
    reader = source(tmp_path, b'{"a": "' + b"x" * 500_000 + b'"}\n')
    (chunk,) = reader.chunks(1000)
    assert chunk.size == 500_010
    assert len(pickle.dumps(chunk)) < 1000


FAULTS = [
    (b'{"a": 1', "train.jsonl:2 is not valid JSON: Expecting ',' delimiter at column"),
    (b"{'a': 1}", "train.jsonl:2 is not valid JSON: its quotes are single, as Python prints a dict; write it with json.dumps"),
    (b"{a: 1}", "train.jsonl:2 is not valid JSON: .* at column 2; found"),
    (b'{"a": "x', "train.jsonl:2 is not valid JSON: Unterminated string starting at column 7; found"),
    (b'{"a": "' + b"x" * 70 + b'"} 1', r"""Extra data at column 81; found 'x+"} 1'; write one"""),
    (b'{"a": 1},', "train.jsonl:2 is not valid JSON: a comma ends the line; take it out"),
    (b'[{"a": 1},\r', "train.jsonl:2 is not valid JSON: the file looks like one JSON array: name it .json"),
    (b'{"a": 1} {"a": 2}', "train.jsonl:2 is not valid JSON: Extra data at column 10"),
    (b'{"a": "\xff"}', "train.jsonl:2 is not UTF-8: byte 0xff at position 8 of the line"),
    (b'{"a": 1, "b": 2, "a": 1}', "train.jsonl:2 cannot be read: an object names the key 'a' more than once; keep one"),
    (b'{"m": [{"role": 1, "role": 2}]}', "train.jsonl:2 cannot be read: an object names the key 'role' more than once"),
    (b"[" * 100_000, "train.jsonl:2 (is nested too deeply|is not valid JSON)"),
    (b'{"a": ' + b"9" * 5000 + b"}", "train.jsonl:2 cannot be read: Exceeds the limit"),
    (b"[1, 2]", "train.jsonl:2 is not an object but a list of 2"),
    (b'"hi"', "train.jsonl:2 is not an object but the string 'hi'"),
    (b"null", "train.jsonl:2 is not an object but null"),
]


@pytest.mark.parametrize(("line", "wanted"), FAULTS)
def test_faults(tmp_path, line, wanted):
    """A line that cannot be read is named by file and line, with the reason."""
    with pytest.raises(DataError, match=wanted):
        rows(source(tmp_path, b'{"a": 0}\n' + line + b"\n"))


@pytest.mark.parametrize(("line", "wanted"), FAULTS)
def test_going_on(tmp_path, line, wanted):
    """A reader that continues after a line that cannot be read gets its error."""
    text = []
    kept = rows(
        source(tmp_path, b'{"a": 0}\n' + line + b'\n{"a": 2}'), refused=lambda row, error: text.append((row, str(error)))
    )
    assert kept == [(1, {"a": 0}), (3, {"a": 2})]
    ((row, message),) = text
    assert row == 2
    assert message.startswith("train.jsonl:2 ")


@pytest.mark.parametrize(
    ("text", "what", "jq"),
    [
        (b'[\n  {"a": 1}\n]\n', "one JSON array over many lines", "jq -c '.[]'"),
        (b'[{\n  "a": 1\n}]\n', "one JSON array over many lines", "jq -c '.[]'"),
        (b'{\n  "a": 1\n}\n{\n  "a": 2\n}\n', "JSON objects over many lines each", "jq -c ."),
    ],
)
def test_a_whole_document(tmp_path, text, what, jq):
    """The error for JSON over many lines has the jq that makes one row a line: of an array, or of objects one after another."""
    with pytest.raises(DataError, match=rf"train.jsonl:1 .* {what}: write one object a line \(`{re.escape(jq)}` does\)"):
        rows(source(tmp_path, text))


def test_utf16(tmp_path):
    """A file in UTF-16 is refused as such."""
    with pytest.raises(DataError, match="UTF-16 byte order mark; save the file as UTF-8"):
        rows(source(tmp_path, '{"a": 1}'.encode("utf-16")))


def test_a_file_that_shrinks(tmp_path):
    """A chunk whose lines are gone when it is read is an error."""
    reader = source(tmp_path, b'{"a": 1}\n{"a": 2}\n')
    (chunk,) = reader.chunks(100)
    (tmp_path / "train.jsonl").write_bytes(b'{"a": 1}\n')
    with pytest.raises(DataError, match="train.jsonl became shorter while it was read"):
        list(chunk.records())


@pytest.mark.parametrize(("data", "lines"), [(b"{}\n{}\n", 2), (b"{}\n{}", 2), (b"{}\n\n\n{}", 4)])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_count(tmp_path, data, lines, name):
    """The count is the number of the last line, with a line end or without."""
    assert source(tmp_path, data, name).count() == lines
