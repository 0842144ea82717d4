"""A file to a store: all of it, or nothing."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_data import DataError, StoreError, TemplateError, TokenStore, prepare, tokenize
from forge_data import _prepare as module

UNTRAINED = {"messages": [{"role": "user", "content": "nobody answers"}]}


def test_store_is_the_rows(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """Sample i is row i, as tokenize gives it, and knows where it came from."""
    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store")
    assert len(store) == len(small_chats)
    for i, row in enumerate(small_chats):
        alone = tokenize(row, chatml_tokenizer)
        assert store[i].input_ids.tolist() == alone.input_ids.tolist()
        assert store[i].labels.tolist() == alone.labels.tolist()
        assert store.source(i) == f"train.jsonl:{i + 1}"
    assert store.lengths.tolist() == [len(example) for example in store]
    assert store.loss_counts.tolist() == [example.loss_count for example in store]


def test_dropped_and_counted(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """Rows without a learned token and rows that are too long are left out, by reason; exactly max_seq_len is kept."""
    sizes = [len(tokenize(row, chatml_tokenizer)) for row in small_chats]
    limit = sorted(sizes)[6]
    rows = [UNTRAINED, *small_chats, UNTRAINED]
    store = prepare(write_rows(["", *rows]), chatml_tokenizer, tmp_path / "store", max_seq_len=limit)
    kept = [i for i, size in enumerate(sizes) if size <= limit]
    assert max(store.lengths) == limit
    assert [store.source(i) for i in range(len(store))] == [f"train.jsonl:{i + 3}" for i in kept]
    books = store.accounting
    assert books.as_dict() == {
        "read": 14,
        "kept": len(kept),
        "dropped": {"no_trained_token": 2, "longer_than_max_seq_len": 12 - len(kept)},
    }


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=30),
    limit=st.integers(1, 9) | st.none(),
    batch=st.integers(1, 7),
)
def test_the_books_balance(tmp_path_factory, chatml_tokenizer, rows, limit, batch):
    """Kept plus dropped is read, whatever the rows, the limit and the batches; batches leave no trace in the store."""
    folder = tmp_path_factory.mktemp("books")
    made = [{"input_ids": [5] * size, "labels": [-100] + [5 if good else -100] * (size - 1)} for size, good in rows]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, made)))
    usable = [good and size > 1 for size, good in rows]
    kept = [size for (size, _), good in zip(rows, usable, strict=True) if good and (limit is None or size <= limit)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS", batch)
        if not kept:
            with pytest.raises(DataError, match="no row is left to train on"):
                prepare(folder / "a.jsonl", chatml_tokenizer, folder / "store", max_seq_len=limit)
            assert not (folder / "store").exists()
            return
        store = prepare(folder / "a.jsonl", chatml_tokenizer, folder / "store", max_seq_len=limit)
    books = store.accounting
    assert books.read == len(rows)
    assert books.kept == len(store) == len(kept)
    assert books.dropped.get("no_trained_token", 0) == usable.count(False)
    assert store.lengths.tolist() == kept
    assert store.fingerprint == prepare(folder / "a.jsonl", chatml_tokenizer, folder / "again", max_seq_len=limit).fingerprint


def test_progress(write_rows, small_chats, chatml_tokenizer, tmp_path, monkeypatch):
    """Progress is told as (row reached, last row), and ends at the last row."""
    monkeypatch.setattr(module, "_ROWS", 5)
    seen = []
    prepare(
        write_rows(small_chats), chatml_tokenizer, tmp_path / "store", progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(5, 12), (10, 12), (12, 12)]


def test_large_rows_make_small_batches(write_rows, small_chats, chatml_tokenizer, tmp_path, monkeypatch):
    """A batch is bounded in bytes as well as in rows, so memory is too."""
    monkeypatch.setattr(module, "_BYTES", 1)
    seen = []
    prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", progress=lambda done, total: seen.append(done))
    assert seen == list(range(1, 13))


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        ("{broken", DataError, "train.jsonl:3 is not valid JSON"),
        ('{"text": "x"}', DataError, "train.jsonl:3 has the fields 'text', which are no known shape"),
        ('{"prompt": "a", "completion": "b"}', DataError,
         "train.jsonl:3 is a row of prompt/completion as strings, but train.jsonl:1 is one of messages; put them into files of their own"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', DataError, r"train.jsonl:3: field messages\[0\].role is the string 'bot'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', DataError, "train.jsonl:3: the conversation begins with an assistant"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("parent", [".", "new/deep"])
def test_nothing_is_left_behind(write_rows, small_chats, chatml_tokenizer, tmp_path, line, error, said, parent):
    """A row that cannot be read ends it all, by file and row, and leaves the disk as it was."""
    path = write_rows([small_chats[0], small_chats[1], line, small_chats[2]])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=said):
        prepare(path, chatml_tokenizer, tmp_path / parent / "store")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_row_far_down(write_rows, small_chats, qwen3, tmp_path):
    """A template that leaves spans open names the row, also when it is amid a batch."""
    bad = {
        "messages": [
            {"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
        ]
    }
    with pytest.raises(TemplateError, match="train.jsonl:13: the chat template of"):
        prepare(write_rows([*small_chats, bad]), qwen3, tmp_path / "store")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, MemoryError])
def test_interrupted(write_rows, small_chats, chatml_tokenizer, tmp_path, interrupt):
    """Ctrl-C leaves nothing behind either."""
    path = write_rows(small_chats)
    before = sorted(tmp_path.rglob("*"))

    def stop(done, total):
        assert len(list(tmp_path.iterdir())) == len(before) + 1
        raise interrupt

    with pytest.raises(interrupt):
        prepare(path, chatml_tokenizer, tmp_path / "store", progress=stop)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_left(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """No row to train on is an error that says why, and by how much."""
    with pytest.raises(
        DataError, match="no row is left to train on: kept 0 of 2 rows; dropped 2 no_trained_token; rows need an assistant"
    ):
        prepare(write_rows([UNTRAINED, UNTRAINED]), chatml_tokenizer, tmp_path / "store")
    shortest = min(len(tokenize(row, chatml_tokenizer)) for row in small_chats)
    with pytest.raises(DataError, match=f"the shortest that was too long has {shortest} tokens, max_seq_len is 3: raise it"):
        prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", max_seq_len=3)
    assert not (tmp_path / "store").exists()


def test_the_place_is_taken(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """What stands at store_dir is never written over; an empty directory is filled."""
    path = write_rows(small_chats)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    for taken in (tmp_path / "full", path):
        with pytest.raises(StoreError, match="exists already; give a new directory"):
            prepare(path, chatml_tokenizer, taken)
    assert (tmp_path / "full" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert len(prepare(path, chatml_tokenizer, tmp_path / "empty")) == 12
    with pytest.raises(StoreError, match="exists already"):
        prepare(path, chatml_tokenizer, tmp_path / "empty")


def test_no_place(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A place that cannot be written is named with the system's reason."""
    path = write_rows(small_chats)
    with pytest.raises(StoreError, match="no token store can be written at .*: Not a directory"):
        prepare(path, chatml_tokenizer, path / "below" / "store")


def test_what_is_on_disk(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """The files are plain little-endian arrays, and store.json vouches for each of them."""
    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", max_seq_len=500)
    folder = tmp_path / "store"
    assert sorted(path.name for path in folder.iterdir()) == [
        "input_ids.bin",
        "loss_mask.bin",
        "offsets.bin",
        "rows.bin",
        "store.json",
    ]
    ids = np.fromfile(folder / "input_ids.bin", dtype="<i4")
    offsets = np.fromfile(folder / "offsets.bin", dtype="<i8")
    mask = np.fromfile(folder / "loss_mask.bin", dtype="u1")
    assert ids[offsets[3] : offsets[4]].tolist() == store[3].input_ids.tolist()
    assert mask[offsets[3] : offsets[4]].tolist() == (store[3].labels != -100).astype(int).tolist()
    assert np.fromfile(folder / "rows.bin", dtype="<i8").tolist() == list(range(1, 13))
    told = json.loads((folder / "store.json").read_text())
    assert told["tokens"] == len(ids) == len(mask)
    assert told["settings"]["max_seq_len"] == 500
    for name, digest in told["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert TokenStore.open(folder).fingerprint == told["fingerprint"] == store.fingerprint


def test_the_fingerprint_is_of_what_is_trained_on(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """Another name of the file changes nothing, another mask or another order does."""

    def fingerprint(name, rows):
        return prepare(write_rows(rows, name), chatml_tokenizer, tmp_path / f"store-{name}").fingerprint

    whole = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [5, 6], "labels": [-100, 6]}]
    one = fingerprint("one.jsonl", whole)
    assert fingerprint("two.jsonl", ["", *whole]) == one
    assert fingerprint("three.jsonl", whole[::-1]) != one
    assert fingerprint("four.jsonl", [whole[0] | {"labels": [-100, -100, 7]}, whole[1]]) != one
