"""A store → JSONL in mini-trainer's form and back, to the same arrays."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from forge_data import DataError, StoreError, TokenStore, prepare
from forge_data.store._manifest import FINGERPRINTED

from ..stores import write


def test_lines(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """One object a sample has input_ids, labels and len, nothing else; views write their own samples."""
    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store")
    path = store.select([3, 1]).to_jsonl(tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert lines == [
        {"input_ids": store[i].input_ids.tolist(), "labels": store[i].labels.tolist(), "len": len(store[i])} for i in (3, 1)
    ]


@pytest.mark.parametrize("name", ["", "store/loss_mask.bin", "store/deep/out.jsonl"])
def test_lines_are_no_part_of_the_store(write_rows, small_chats, chatml_tokenizer, tmp_path, monkeypatch, name):
    """A file inside the store's own directory, or without a name, is refused, and the store stays whole."""
    monkeypatch.chdir(tmp_path)
    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store")
    with pytest.raises(StoreError, match="must be a file, and outside of the store"):
        store.to_jsonl(name)
    store.verify()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=2, max_size=30), min_size=1, max_size=8))
def test_there_and_back(tmp_path_factory, rows):
    """Written and read again, the arrays and the fingerprint are the same; a label on the first token stays."""
    folder = tmp_path_factory.mktemp("round")
    lines = []
    for row in rows:
        row[-1] = (row[-1][0], True)
        lines.append(
            {"input_ids": [i for i, _ in row], "labels": [i if learned else -100 for i, learned in row], "len": len(row)}
        )
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    store = TokenStore.from_jsonl(folder / "in.jsonl", folder / "store")
    store.to_jsonl(folder / "out.jsonl")
    assert list(map(json.loads, (folder / "out.jsonl").read_text().splitlines())) == lines
    again = TokenStore.from_jsonl(folder / "out.jsonl", folder / "again")
    assert again.fingerprint == store.fingerprint
    for name in (each for each in FINGERPRINTED if (store.path / each).exists()):
        assert (store.path / name).read_bytes() == (again.path / name).read_bytes()
    assert again[0].segments.tolist() == [[0, len(rows[0])]]
    assert again[0].roles == ("tokens",)


def test_without_and_with_a_tokenizer(write_rows, chatml_tokenizer, tmp_path):
    """Without a tokenizer there is none to decode with; with one, ids outside its vocabulary are refused."""
    path = write_rows([{"input_ids": [5, 6], "labels": [-100, 6], "len": 2}])
    with pytest.raises(StoreError, match="was made from token ids without a tokenizer"):
        TokenStore.from_jsonl(path, tmp_path / "without").tokenizer()
    with_one = TokenStore.from_jsonl(path, tmp_path / "with", tokenizer=chatml_tokenizer)
    assert with_one.tokenizer().decode([5, 6]) == chatml_tokenizer.decode([5, 6])
    far = write_rows([{"input_ids": [5, 600], "labels": [-100, 600], "len": 2}], "far.jsonl")
    with pytest.raises(DataError, match=r"far.jsonl:1: field input_ids\[1\] is 600, outside the vocabulary"):
        TokenStore.from_jsonl(far, tmp_path / "far", tokenizer=chatml_tokenizer)
    assert not (tmp_path / "far").exists()


def test_other_rows(write_rows, small_chats, tmp_path):
    """A file of other rows is refused by row."""
    with pytest.raises(DataError, match="train.jsonl:1 has the fields 'messages', but the format tokenised needs input_ids"):
        TokenStore.from_jsonl(write_rows(small_chats), tmp_path / "store")


def test_written_whole_or_not(tmp_path, monkeypatch):
    """An existing file stays until the new one is complete, and nothing else is left."""
    store = write(tmp_path / "store", [1, 2])
    (tmp_path / "out.jsonl").write_text("old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StoreError, match=r"out.jsonl could not be written: No space left"):
        patch.setattr("forge_data.store._jsonl.json.dumps", full)
        store.to_jsonl(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "store"]
    store.to_jsonl(tmp_path / "out.jsonl")
    assert np.array_equal(json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["labels"], [-100, 2])
    with pytest.raises(StoreError, match=r"nowhere/out.jsonl could not be written: No such file"):
        store.to_jsonl(tmp_path / "nowhere" / "out.jsonl")
