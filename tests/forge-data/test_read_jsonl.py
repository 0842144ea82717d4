"""JSONL: every fault has its line."""

import pytest

from forge_data import DataError
from forge_data._read_jsonl import JsonLines


def rows(tmp_path, data):
    path = tmp_path / "train.jsonl"
    path.write_bytes(data)
    return [(row, value) for row, value, _ in JsonLines(path).rows()]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines(tmp_path, end, mark):
    """Blank lines are passed over and counted, a byte order mark and either line end are fine, the last line needs none."""
    data = mark + end.join([b'{"a": 1}', b"", b"  ", '{"a": "é"}'.encode(), b'{"a": 3}'])
    assert rows(tmp_path, data) == [(1, {"a": 1}), (4, {"a": "é"}), (5, {"a": 3})]


def test_separators_within_a_string(tmp_path):
    """What Unicode calls a line end is none in JSONL."""
    assert rows(tmp_path, '{"a": "x\u2028y\x85z"}\n'.encode()) == [(1, {"a": "x\u2028y\x85z"})]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a": 1', "train.jsonl:2 is not valid JSON: Expecting ',' delimiter at column"),
        (b"{'a': 1}", "train.jsonl:2 is not valid JSON: .* at column 2; found"),
        (b'{"a": 1} {"a": 2}', "train.jsonl:2 is not valid JSON: Extra data at column 10"),
        (b'{"a": "\xff"}', "train.jsonl:2 is not UTF-8: byte 0xff at position 8 of the line"),
        (b'{"a": 1, "b": 2, "a": 1}', "train.jsonl:2 cannot be read: an object names the key 'a' more than once; keep one"),
        (b'{"m": [{"role": 1, "role": 2}]}', "train.jsonl:2 cannot be read: an object names the key 'role' more than once"),
        (b"[" * 100_000, "train.jsonl:2 (is nested too deeply|is not valid JSON)"),
        (b'{"a": ' + b"9" * 5000 + b"}", "train.jsonl:2 cannot be read: Exceeds the limit"),
    ],
)
def test_faults(tmp_path, line, said):
    """A line that cannot be read is named by file and line, with the reason."""
    with pytest.raises(DataError, match=said):
        rows(tmp_path, b'{"a": 0}\n' + line + b"\n")


def test_a_whole_document(tmp_path):
    """A JSON document over many lines is told how to become one row a line."""
    with pytest.raises(DataError, match="train.jsonl:1 .* one JSON document over many lines: write one object a line"):
        rows(tmp_path, b'[\n  {"a": 1}\n]\n')


def test_utf16(tmp_path):
    """A file in UTF-16 is told so."""
    with pytest.raises(DataError, match="UTF-16 byte order mark; save the file as UTF-8"):
        rows(tmp_path, '{"a": 1}'.encode("utf-16"))


@pytest.mark.parametrize(("data", "lines"), [(b"{}\n{}\n", 2), (b"{}\n{}", 2), (b"{}\n\n\n{}", 4)])
def test_count(tmp_path, data, lines):
    """The count is the number of the last line, with a line end or without."""
    (tmp_path / "a.jsonl").write_bytes(data)
    assert JsonLines(tmp_path / "a.jsonl").count() == lines
