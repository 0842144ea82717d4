"""Stores as datasets and Parquet files, in slices and in plain arrays: the same numbers as their examples."""

import datasets
import numpy as np
import pytest
from pyarrow import parquet

import forge_data
from forge_data import StoreError, prepare
from forge_data.store import _table


@pytest.fixture
def store(chatml_tokenizer, small_chats, write_rows, tmp_path):
    """Twelve samples."""
    return prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", progress=False)


def columns(examples):
    """Ids and labels of examples as lists."""
    return {
        "input_ids": [example.input_ids.tolist() for example in examples],
        "labels": [example.labels.tolist() for example in examples],
    }


@pytest.mark.parametrize("rows", [5, 12, 1024])
def test_a_dataset_and_parquet_hold_the_samples(store, rows, tmp_path, monkeypatch):
    """Every sample of a store or view is a row, in order, however many rows a batch has."""
    monkeypatch.setattr(_table, "_ROWS", rows)
    view = store.select([3, 1, 11])
    for each in (store, view, store[4:4]):
        made = each.to_dataset()
        assert made.to_dict() == columns(each)
        assert made.features["labels"] == datasets.List(datasets.Value("int32"))
        file = each.to_parquet(tmp_path / "tokens.parquet")
        assert parquet.read_table(file).to_pydict() == columns(each)
    assert store.to_dataset()._fingerprint != view.to_dataset()._fingerprint
    assert not list(tmp_path.glob("*.partial"))


def test_weights_are_a_column_of_both(chatml_tokenizer, write_rows, tmp_path):
    """Of a store of which some row has a weight; the others have 1 at each learned token."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": chat, "weight": weight} for weight in (1, 2.5)]
    store = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store", progress=False)
    masks = [example.labels != -100 for example in store]
    wanted = {**columns(store), "weights": [(masks[0] * 1.0).tolist(), (masks[1] * 2.5).tolist()]}
    assert store.to_dataset().to_dict() == wanted
    assert parquet.read_table(store.to_parquet(tmp_path / "tokens.parquet")).to_pydict() == wanted


def test_preferences_are_a_row_each(chatml_tokenizer, write_rows, tmp_path):
    """A pair is one row with both sides and its margin; an unpaired answer says whether it is wanted."""
    pairs = [{"prompt": f"{n}?", "chosen": "yes " * n, "rejected": "no", "margin": n / 2} for n in range(1, 4)]
    store = prepare(write_rows(pairs), chatml_tokenizer, tmp_path / "pairs", progress=False)
    found = store.select([2, 3, 0, 1]).to_dataset().to_dict()
    assert found["chosen_input_ids"] == [store[2].input_ids.tolist(), store[0].input_ids.tolist()]
    assert found["rejected_labels"] == [store[3].labels.tolist(), store[1].labels.tolist()]
    assert found["margin"] == [1.0, 0.5]
    answers = [{"prompt": f"{n}?", "completion": "yes", "label": n > 1} for n in range(3)]
    store = prepare(write_rows(answers, "answers.jsonl"), chatml_tokenizer, tmp_path / "answers", progress=False)
    assert store.to_dataset().to_dict() == {**columns(store), "desirable": [False, False, True]}


def test_a_file_that_cannot_be_written(store, tmp_path):
    """A file within the store, or in no folder, is refused by name; nothing is left."""
    with pytest.raises(StoreError, match="outside of the store"):
        store.to_parquet(store.path / "tokens.parquet")
    with pytest.raises(StoreError, match=r"nowhere/tokens\.parquet could not be written"):
        store.to_parquet(tmp_path / "nowhere" / "tokens.parquet")
    store.verify()


@pytest.mark.parametrize("part", [slice(10, 20), slice(None), slice(-3, None), slice(None, None, -2), slice(4, 4)])
def test_slices_are_views(store, part, chatml_tokenizer, write_rows, tmp_path):
    """A slice has the samples that a list's slice has, also of a view and of prompts, and no copy of their tokens."""
    indices = list(range(12))[part]
    assert columns(store[part]) == columns([store[index] for index in indices])
    assert columns(store[2:][part]) == columns([store[index + 2] for index in list(range(10))[part]])
    assert store[part].path == store.path
    prompts = forge_data.prepare_prompts(
        write_rows([{"prompt": str(n)} for n in range(12)], "prompts.jsonl"), chatml_tokenizer, tmp_path / "prompts"
    )
    assert [prompt.prompt for prompt in prompts[part]] == [str(index) for index in indices]


def test_plain_arrays_are_the_callers(store):
    """`as_dict` copies: int64 arrays that may be written to, of a stored example and of one in memory."""
    for example in (store[3], forge_data.TokenizedExample(np.array([1], np.int32), np.array([-100], np.int32))):
        found = example.as_dict()
        assert {name: values.dtype for name, values in found.items()} == {"input_ids": np.int64, "labels": np.int64}
        assert found["labels"].tolist() == example.labels.tolist()
        found["input_ids"][0] = 7
    store.verify()
