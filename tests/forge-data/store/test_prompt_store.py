"""A store of prompts: contents, views, and refusals."""

import json
import pickle
import shutil

import numpy as np
import pytest

from forge_data import DataError, Prompt, PromptStore, StoreError, TokenStore, prepare, prepare_prompts

ROWS = [{"prompt": f"count to {n}", "answer": n, "kind": {"n": [n, None, n / 7]}} for n in range(12)]


@pytest.fixture
def store(write_rows, chatml_tokenizer, tmp_path):
    return prepare_prompts(write_rows(ROWS), chatml_tokenizer, tmp_path / "store")


def test_what_is_in_it(store, chatml_tokenizer):
    """Prompt i is row i: tokens, text, further fields, and place."""
    assert len(store) == 12
    for at, row in enumerate(ROWS):
        prompt = store[at]
        assert isinstance(prompt, Prompt)
        assert prompt.input_ids.dtype == np.int32
        assert prompt.input_ids.tolist() == chatml_tokenizer(row["prompt"])["input_ids"]
        assert prompt.prompt == row["prompt"]
        assert prompt.columns == {"answer": at, "kind": row["kind"]}
        assert store.source(at) == f"train.jsonl:{at + 1}"
    assert store.lengths.tolist() == [len(prompt) for prompt in store]
    assert store[-1].prompt == "count to 11"
    with pytest.raises(IndexError, match="prompt 12 of a store of 12"):
        store[12]


def test_views(store):
    """`select` is a view in the order given, also of a view; it pickles and has a fingerprint of its own."""
    view = store.select([5, 3, 8]).select([2, 0])
    assert [prompt.columns["answer"] for prompt in view] == [8, 5]
    assert view.source(0) == "train.jsonl:9"
    assert view.lengths.tolist() == [len(store[8]), len(store[5])]
    assert view.fingerprint != store.fingerprint
    other = pickle.loads(pickle.dumps(view))
    assert (other.fingerprint, other[1].prompt) == (view.fingerprint, "count to 5")
    assert repr(view) == f"PromptStore({str(store.path)!r}, prompts=2, tokens={int(view.lengths.sum())})"


def test_repetitions_stay_together(write_rows, chatml_tokenizer, tmp_path):
    """Prompts of the same tokens are on one side of a split, whatever their other fields; so are those of one row."""
    rows = [{"prompt": f"count to {n % 8}", "answer": n} for n in range(40)]
    store = prepare_prompts(write_rows(rows), chatml_tokenizer, tmp_path / "store", seed=3)
    for seed in range(5):
        train, held_out = store.split(0.25, seed)
        assert not {prompt.prompt for prompt in train} & {prompt.prompt for prompt in held_out}
        assert sorted(prompt.columns["answer"] for part in (train, held_out) for prompt in part) == list(range(40))
        assert len(held_out) == 10
    assert store.split(0.25)[1].fingerprint == store.split(0.25, 3)[1].fingerprint
    with pytest.raises(DataError, match="a held-out share of 0.01 of 40 prompts leaves 40 to train on and 0"):
        store.split(0.01)


def test_of_one_row(write_rows, chatml_tokenizer, tmp_path):
    """Prompts that preprocess made of one row are held out together."""

    def twice(row):
        return [{"prompt": row["prompt"] + mark} for mark in "?!"]

    store = prepare_prompts(write_rows(ROWS), chatml_tokenizer, tmp_path / "store", preprocess=twice)
    train, held_out = store.split(0.3, 0)
    rows = [{part.source(at) for at in range(len(part))} for part in (train, held_out)]
    assert not rows[0] & rows[1]
    assert len(train) + len(held_out) == 24


def test_each_knows_the_other(store, write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A store of prompts is refused as a token store, and the other way round; both errors name the right class."""
    tokens = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "tokens")
    with pytest.raises(StoreError, match=r"is a store of prompts; open it as a PromptStore"):
        TokenStore.open(store.path)
    with pytest.raises(StoreError, match=r"is a store of samples; open it as a TokenStore"):
        PromptStore.open(tokens.path)
    with pytest.raises(StoreError, match="is not a token store"):
        PromptStore.open(tmp_path)


@pytest.mark.parametrize(
    "name", ["input_ids.bin", "offsets.bin", "rows.bin", "records.bin", "record_offsets.bin", "dropped.jsonl"]
)
def test_damage_is_seen(store, tmp_path, name, write_rows, chatml_tokenizer):
    """A changed byte is found by `verify`, a missing one by `open`; preparing again repairs both."""
    rows = [*ROWS, {"prompt": ""}]
    store = prepare_prompts(write_rows(rows), chatml_tokenizer, tmp_path / "other")
    path = store.path / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StoreError, match=f"{name} (does not hold what was written|is damaged)"):
        PromptStore.open(store.path).verify()
    again = prepare_prompts(write_rows(rows), chatml_tokenizer, tmp_path / "other")
    again.verify()
    assert again.fingerprint == store.fingerprint
    path.write_bytes(content[:-1])
    with pytest.raises(StoreError, match="is torn"):
        PromptStore.open(store.path)


def test_a_missing_manifest(store, tmp_path):
    """A copy without its manifest is no store, and neither is one of another program."""
    shutil.copytree(store.path, tmp_path / "copy")
    message = json.loads((tmp_path / "copy" / "store.json").read_text())
    (tmp_path / "copy" / "store.json").write_text(json.dumps(message | {"kind": "supervised"}))
    with pytest.raises(StoreError, match="damaged"):
        TokenStore.open(tmp_path / "copy")
    (tmp_path / "copy" / "store.json").unlink()
    with pytest.raises(StoreError, match="is not a token store"):
        PromptStore.open(tmp_path / "copy")
