"""JSON documents: an array is read row by row, and errors have their index."""

import json
import tracemalloc
from contextlib import nullcontext

import pytest
from hypothesis import given, strategies as st

from forge_data import DataError
from forge_data.reading import _json as module
from forge_data.reading._file import DataFile
from forge_data.reading._json import JsonDocument, open_json
from forge_data.reading._jsonl import JsonLines


def reader(tmp_path, text):
    path = tmp_path / "train.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_json("train.json", DataFile(str(path)))


def rows(opened, size=1 << 20, refused=None):
    return [(record.place, record.fields) for chunk in opened.chunks(size) for record in chunk.records(refused)]


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_an_array(tmp_path, indent):
    """Rows of an array are named by their index, however it is laid out."""
    values = [{"a": 1}, {"a": "é]"}, {"b": [{"c": None}]}]
    opened = reader(tmp_path, json.dumps(values, indent=indent))
    assert isinstance(opened, JsonDocument)
    assert rows(opened) == [(f"train.json[{i}]", value) for i, value in enumerate(values)]
    assert [chunk.last_row for chunk in opened.chunks(1)] == [0, 1, 2]


def test_lines(tmp_path):
    """A .json file of one object a line is read as JSONL, a single row too."""
    for text, count in (('{"a": 1}\n{"a": 2}\n', 2), ('\n{"a": 1}', 1), ('{"a": ' + '"x' * 200_000, 0)):
        opened = reader(tmp_path, text)
        assert isinstance(opened, JsonLines)
        assert count == 0 or len(rows(opened)) == count


def test_one_object(tmp_path):
    """An object over many lines is one row."""
    row = {"messages": [{"role": "user", "content": "hi"}]}
    assert rows(reader(tmp_path, json.dumps(row, indent=1))) == [("train.json[0]", row)]


_TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.text(max_size=20)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(
    values=st.lists(st.dictionaries(st.text(max_size=5), _TREES.filter(lambda v: v is not None), max_size=4), max_size=8),
    block=st.integers(1, 60),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
def test_any_block(tmp_path_factory, values, block, indent, ascii_only):
    """Wherever a block of the file ends (within a number, an escape, a character), the values are those that json reads."""
    folder = tmp_path_factory.mktemp("json")
    opened = reader(folder, json.dumps(values, indent=indent, ensure_ascii=ascii_only))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        assert [fields for _, fields in rows(opened)] == values


FAULTS = [
    ('[{"a": 1}, {"a": tru}, {"a": 3}]', r"train.json\[1\] is not valid JSON: Expecting value, near "),
    ('[{"a": 1}, {"a": 2}', r"train.json breaks off after \[1\]: the array is not closed"),
    ('[{"a": 1}, {"a": ', r"train.json\[1\] is not valid JSON"),
    ('[{"a": 1},\n]', r"train.json\[1\] is not valid JSON: a comma stands before the end of the array; take it out"),
    ('[{"a": 1} {"a": 2}]', r"train.json\[0\] is followed by '\{'"),
    ('[{"a": 1}] [', r"train.json continues after its array with '\['"),
    ('[{"a": 1, "a": 2}]', r"train.json\[0\] cannot be read: an object names the key 'a' more than once"),
    ('[{"a": 1}, 5]', r"train.json\[1\] is not an object but int 5"),
    (b'[{"a": "\xff"}]', "train.json is not UTF-8"),
    ("[" * 100_000, r"train.json\[0\] (is nested too deeply|is not valid JSON)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FAULTS)
def test_faults(tmp_path, text, expected):
    """An error is named by its index in the array."""
    with pytest.raises(DataError, match=expected):
        rows(reader(tmp_path, text))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "broken"), [('{"a": 1}', False), ('{"a" 1}', True)])
def test_memory(tmp_path, first, broken):
    """A large array takes no more memory than a row and a block, also if it turns out to be broken."""
    row = json.dumps({"a": "x" * 200})
    opened = reader(tmp_path, f"[{first}, {','.join([row] * 40_000)}]")
    tracemalloc.start()
    with pytest.raises(DataError, match=r"\[0\] is not valid JSON: Expecting ':' delimiter") if broken else nullcontext():
        assert sum(len(chunk.rows) for chunk in opened.chunks(1 << 16)) == 40_001
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
