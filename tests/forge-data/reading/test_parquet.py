"""Parquet: the same rows as JSONL."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from forge_data import DataError, prepare
from forge_data.reading._file import DataFile
from forge_data.reading._parquet import ParquetFile


def source(path):
    return ParquetFile(path.name, DataFile(str(path)))


def rows(reader, size=1 << 20):
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in reader.chunks(size)]
    return [(record.row, record.fields) for chunk in chunks for record in chunk.records()]


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_rows(tmp_path, size):
    """Rows come in order with 1-based numbers, over row groups, batches and chunks; the footer has their count."""
    values = [{"a": i, "b": [{"c": str(i)}]} for i in range(1000)]
    parquet.write_table(pa.Table.from_pylist(values), tmp_path / "a.parquet", row_group_size=300)
    assert rows(source(tmp_path / "a.parquet"), size) == list(enumerate(values, start=1))
    assert source(tmp_path / "a.parquet").count() == 1000


def test_the_same_store_as_jsonl(tmp_path, write_rows, small_chats, chatml_tokenizer):
    """JSONL and Parquet with the same rows, columns of nulls included, give the same tokens."""
    table = pa.Table.from_pylist([row | {"source": None, "note": "x"} for row in small_chats])
    parquet.write_table(table, tmp_path / "a.parquet")
    one = prepare(tmp_path / "a.parquet", chatml_tokenizer, tmp_path / "one", num_proc=1, progress=False)
    two = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "two", num_proc=1, progress=False)
    assert one.fingerprint == two.fingerprint
    assert one.source(4) == "a.parquet:5"


def test_tokenised_rows(tmp_path, chatml_tokenizer):
    """Lists of numbers are read as they are."""
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "len": 3}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    store = prepare(tmp_path / "a.parquet", chatml_tokenizer, tmp_path / "store", num_proc=1, progress=False)
    assert store[0].labels.tolist() == row["labels"]


def test_no_parquet(tmp_path):
    """A file with only the suffix is refused by name."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is no Parquet file")
    with pytest.raises(DataError, match=r"a.parquet is not a Parquet file that can be read"):
        rows(source(tmp_path / "a.parquet"))


def test_damaged(tmp_path):
    """A file with damaged pages is refused by name when they are reached."""
    table = pa.table({"a": [f"row {i}" for i in range(5000)]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="gzip")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[100:2000] = b"\xff" * 1900
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"a.parquet: unreadable after row 0"):
        rows(source(tmp_path / "a.parquet"))


def _not_utf8(path):
    words = [b"fine"] * 300 + [b"caf\xe9!"] + [b"fine"] * 10
    ends = np.cumsum([0, *map(len, words)], dtype=np.int32)
    text = pa.Array.from_buffers(pa.string(), len(words), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(words))])
    parquet.write_table(pa.table({"id": range(len(words)), "completion": text}), path)
    return source(path)


@pytest.mark.parametrize("size", [500, 1 << 20])
def test_text_that_is_not_utf8(tmp_path, size):
    """Bytes that are not text are refused by row and column."""
    with pytest.raises(DataError, match="^a.parquet:301: field completion cannot be read: not UTF-8: byte 0xe9 at position 4"):
        rows(_not_utf8(tmp_path / "a.parquet"), size)


def test_going_on(tmp_path):
    """A reader can continue after a row that cannot be read."""
    message = []
    kept = [
        record.row
        for chunk in _not_utf8(tmp_path / "a.parquet").chunks(1 << 20)
        for record in chunk.records(lambda row, _: message.append(row))
    ]
    assert message == [301]
    assert kept == [*range(1, 301), *range(302, 312)]


def test_a_column_twice(tmp_path):
    """Two columns of one name are refused."""
    parquet.write_table(pa.table([[1], [2], [3]], names=["a", "b", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="^a.parquet: more than one column is called 'a'; keep one of them"):
        rows(source(tmp_path / "a.parquet"))


def test_a_field_twice(tmp_path):
    """Two fields of one name within a column are refused."""
    inner = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    parquet.write_table(pa.table({"a": inner}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="^a.parquet:1: field a cannot be read: .*duplicate field names"):
        rows(source(tmp_path / "a.parquet"))
