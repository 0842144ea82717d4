"""Tables: rows as they were before the schema filled them with nulls."""

import pickle

import datasets
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from forge_data import DataError
from forge_data.reading._table import TableRows, table_chunks, without_nulls

CALLS = [
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "x", "tool_call_id": "7"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "say", "arguments": {"words": ["a", "b"]}}}]},
]


def test_nulls_go():
    """A field that the schema filled with null is absent, at any depth."""
    (batch,) = pa.Table.from_pylist([{"messages": CALLS, "more": None}, {"messages": CALLS[1:2], "more": 1}]).to_batches()
    one, two = TableRows("t", 1, batch).records()
    assert one.fields == {"messages": CALLS}
    assert two.fields == {"messages": CALLS[1:2], "more": 1}
    assert (one.place, two.row) == ("t:1", 2)


def test_nulls_in_lists_stay():
    """A null item of a list stays."""
    assert without_nulls({"a": [None, {"b": None, "c": [1, None]}]}) == {"a": [None, {"c": [1, None]}]}


def test_json_columns():
    """JSON that `datasets` keeps as text within Arrow is decoded, its own nulls kept."""
    rows = [{"tools": [{"name": "f", "default": None}], "n": {"a": 1}}, {"tools": [{"x": [1, {"y": 2}]}], "n": {"a": None}}]
    features = datasets.Features({"tools": datasets.List(datasets.Json()), "n": {"a": datasets.Value("int64")}})
    made = datasets.Dataset.from_list(rows, features=features)
    (batch,) = made.with_format("arrow")[:].combine_chunks().to_batches()
    assert [record.fields for record in TableRows("t", 1, batch).records()] == [rows[0], rows[1] | {"n": {}}]


@given(sizes=st.lists(st.integers(0, 12), max_size=5), size=st.integers(1, 400))
def test_chunks_leave_no_trace(sizes, size):
    """For any batches and chunks, rows are numbered through, and a chunk holds its own rows only."""
    numbers = iter(range(sum(sizes)))
    batches = [pa.RecordBatch.from_pydict({"a": pa.array([next(numbers) for _ in range(n)], pa.int64())}) for n in sizes]
    chunks = list(table_chunks("t", iter(batches), size))
    got = [record for chunk in chunks for record in pickle.loads(pickle.dumps(chunk)).records()]
    assert [(record.row, record.fields["a"]) for record in got] == [(i + 1, i) for i in range(sum(sizes))]
    assert all(chunk.size <= max(size, 8) for chunk in chunks)
    assert [chunk.last_row for chunk in chunks][-1:] == [sum(sizes)] * bool(chunks)


def test_a_slice_is_sent_alone():
    """A slice of a large batch is pickled as the slice."""
    batch = pa.RecordBatch.from_pydict({"a": ["x" * 1000] * 1000})
    first = next(table_chunks("t", iter([batch]), 4000))
    assert len(pickle.dumps(first)) < 20_000


def test_a_date_out_of_range():
    """A date that Python does not have is named by its row and field."""
    batch = pa.RecordBatch.from_arrays([pa.array([0, 2**60], pa.timestamp("s"))], names=["when"])
    with pytest.raises(DataError, match="t:2: field when cannot be read"):
        list(TableRows("t", 1, batch).records())
