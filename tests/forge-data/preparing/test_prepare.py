"""A file → a store: all of it, or nothing."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from forge_data import DataError, StoreError, TokenStore, prepare, tokenize
from forge_data.preparing import _job as _work, _pipeline

UNTRAINED = {"messages": [{"role": "user", "content": "nobody answers"}]}


def test_store_is_the_rows(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """Sample i is row i as tokenize gives it, and knows where it came from."""
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
    assert (books.read, books.kept, books.samples) == (14, len(kept), len(kept))
    assert books.dropped == {"no_trained_token": 2, "longer_than_max_seq_len": 12 - len(kept)}
    assert books.tokens_kept == store.lengths.sum()
    assert books.tokens_lost["longer_than_max_seq_len"] == sum(sizes) - books.tokens_kept
    dropped = list(store.dropped())
    assert [each["row"] for each in dropped] == [2, *(i + 3 for i in range(12) if i not in kept), 15]
    assert [each["tokens"] for each in dropped[1:-1]] == [size for size in sizes if size > limit]
    assert {each["file"] for each in dropped} == {"train.jsonl"}


def test_drops_are_loud(write_rows, small_chats, chatml_tokenizer, tmp_path, logged):
    """Rows that were left out are logged as a warning of `forge_data`; without any, nothing is."""
    messages = logged()
    prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "all")
    assert messages == []
    prepare(write_rows([UNTRAINED, *small_chats]), chatml_tokenizer, tmp_path / "most")
    assert messages == ["train.jsonl: kept 12 of 13 rows; dropped 1 no_trained_token"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=30),
    limit=st.integers(1, 9) | st.none(),
    batch=st.integers(1, 7),
)
def test_the_books_balance(tmp_path_factory, chatml_tokenizer, rows, limit, batch):
    """Kept plus dropped is read, for any rows, limit and batches, and batches leave no trace in the store."""
    folder = tmp_path_factory.mktemp("books")
    made = [{"input_ids": [5] * size, "labels": [-100] + [5 if good else -100] * (size - 1)} for size, good in rows]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, made)))
    usable = [good and size > 1 for size, good in rows]
    kept = [size for (size, _), good in zip(rows, usable, strict=True) if good and (limit is None or size <= limit)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_work, "_ROWS", batch)
        patch.setattr(_pipeline, "_CHUNK_BYTES", 40 * batch)
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
    """Progress is reported as (row reached, last row), and ends at the last row."""
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", 1)
    seen = []
    paths = [write_rows(small_chats), write_rows(small_chats[:3], "more.jsonl")]
    prepare(paths, chatml_tokenizer, tmp_path / "store", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(row, 15) for row in range(1, 16)]


@pytest.mark.parametrize(("rows", "size"), [(512, 1), (1, 1 << 20)])
def test_large_rows_make_small_batches(write_rows, small_chats, chatml_tokenizer, tmp_path, monkeypatch, rows, size):
    """A batch is bounded in bytes as well as in rows; the store does not depend on it."""
    whole = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "whole").fingerprint
    monkeypatch.setattr(_work, "_ROWS", rows)
    monkeypatch.setattr(_work, "_BYTES", size)
    seen = []
    inner = _work.Encoder.begin
    monkeypatch.setattr(_work.Encoder, "begin", lambda encoder, samples: seen.append(len(samples)) or inner(encoder, samples))
    assert prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store").fingerprint == whole
    assert seen == [1] * 12


@pytest.mark.parametrize(
    ("line", "error", "expected"),
    [
        ("{broken", DataError, "train.jsonl:3 is not valid JSON"),
        ('{"text": 7}', DataError, "train.jsonl:3 is a row of text, but train.jsonl:1 is one of messages; the first 4 rows are "
                                   "3 of messages"),
        ('{"words": "x"}', DataError, "train.jsonl:3 has the fields 'words', which are no known format"),
        ('{"prompt": "a", "completion": "b"}', DataError,
         r"train.jsonl:3 is a row of prompt_completion, but train.jsonl:1 is one of messages; the first 4 rows are 3 of "
         r"messages "
         r"\(the first is train.jsonl:1\), 1 of prompt_completion \(the first is train.jsonl:3\); a file holds one format"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', DataError, r"train.jsonl:3: field messages\[0\].role is the string "
                                                                       r"'bot'"),
        ('{"messages": []}', DataError, "train.jsonl:3"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("parent", [".", "new/deep"])
def test_nothing_is_left_behind(write_rows, small_chats, chatml_tokenizer, tmp_path, line, error, expected, parent):
    """A row that cannot be read ends it by file and row, and leaves the disk as it was."""
    path = write_rows([small_chats[0], small_chats[1], line, small_chats[2]])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=expected):
        prepare(path, chatml_tokenizer, tmp_path / parent / "store")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_row_far_down(write_rows, small_chats, chatml_tokenizer, chat, tmp_path):
    """A template that refuses a row names it, also inside a batch with a later broken row."""
    bad = chat(("user", "a"), ("assistant", "b\ud800"))
    with pytest.raises(DataError, match=r"train\.jsonl:13"):
        prepare(write_rows([*small_chats, json.dumps(bad), small_chats[0], "{broken"]), chatml_tokenizer, tmp_path / "store")


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
    """No row to train on is an error with the reason and the shortest length."""
    with pytest.raises(
        DataError, match="no row is left to train on: kept 0 of 2 rows; dropped 2 no_trained_token; rows need an assistant"
    ):
        prepare(write_rows([UNTRAINED, UNTRAINED]), chatml_tokenizer, tmp_path / "store")
    shortest = min(len(tokenize(row, chatml_tokenizer)) for row in small_chats)
    with pytest.raises(DataError, match=f"the shortest that was too long has {shortest} tokens, `max_seq_len` is 3: raise it"):
        prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", max_seq_len=3)
    assert not (tmp_path / "store").exists()


def test_the_place_is_taken(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """What is at store_dir is never overwritten; an empty directory is filled."""
    path = write_rows(small_chats)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    for taken in (tmp_path / "full", path):
        with pytest.raises(StoreError, match="exists already and is n"):
            prepare(path, chatml_tokenizer, taken)
    assert (tmp_path / "full" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert len(prepare(path, chatml_tokenizer, tmp_path / "empty")) == 12


def test_no_place(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A directory that cannot be written is named with the system's reason."""
    path = write_rows(small_chats)
    with pytest.raises(StoreError, match="no token store can be written at .*: Not a directory"):
        prepare(path, chatml_tokenizer, path / "below" / "store")


def test_what_is_on_disk(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """The files are plain little-endian arrays, and store.json holds the hash of each."""
    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", max_seq_len=500)
    folder = tmp_path / "store"
    assert sorted(path.name for path in folder.iterdir()) == [
        "dropped.jsonl",
        "input_ids.bin",
        "lint.json",
        "loss_mask.bin",
        "offsets.bin",
        "rows.bin",
        "segment_offsets.bin",
        "segment_roles.bin",
        "segment_starts.bin",
        "store.json",
        "tokenizer",
    ]
    ids = np.fromfile(folder / "input_ids.bin", dtype="<i4")
    offsets = np.fromfile(folder / "offsets.bin", dtype="<i8")
    mask = np.fromfile(folder / "loss_mask.bin", dtype="u1")
    assert ids[offsets[3] : offsets[4]].tolist() == store[3].input_ids.tolist()
    assert mask[offsets[3] : offsets[4]].tolist() == (store[3].labels != -100).astype(int).tolist()
    assert np.fromfile(folder / "rows.bin", dtype="<i8").tolist() == list(range(1, 13))
    message = json.loads((folder / "store.json").read_text())
    assert message["tokens"] == len(ids) == len(mask)
    assert message["settings"]["max_seq_len"] == 500
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(message["sha256"]) == set(message["sizes"]) == on_disk - {"store.json"}
    for name, digest in message["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert TokenStore.open(folder).fingerprint == message["fingerprint"] == store.fingerprint


def test_the_fingerprint_is_of_what_is_trained_on(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """Another name of the file does not change it, another mask or order does."""

    def fingerprint(name, rows):
        return prepare(write_rows(rows, name), chatml_tokenizer, tmp_path / f"store-{name}").fingerprint

    whole = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [5, 6], "labels": [-100, 6]}]
    one = fingerprint("one.jsonl", whole)
    assert fingerprint("two.jsonl", ["", *whole]) == one
    assert fingerprint("three.jsonl", whole[::-1]) != one
    assert fingerprint("four.jsonl", [whole[0] | {"labels": [-100, -100, 7]}, whole[1]]) != one


def test_segments_and_tokenizer(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A store keeps the role of each token, and the tokenizer with its template."""
    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store")
    for i, row in enumerate(small_chats):
        alone = tokenize(row, chatml_tokenizer)
        assert store[i].segments.tolist() == alone.segments.tolist()
        assert store[i].roles == alone.roles
        assert {"user", "assistant"} <= set(alone.roles)
    kept = store.tokenizer()
    assert kept.chat_template == chatml_tokenizer.chat_template
    assert kept.backend_tokenizer.to_str() == chatml_tokenizer.backend_tokenizer.to_str()


def test_formats(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A chosen format is not detected; an unknown one is refused before anything is read."""
    both = [row | {"text": "words"} for row in small_chats]
    with pytest.raises(DataError, match="fit more than one format: messages and text"):
        prepare(write_rows(both), chatml_tokenizer, tmp_path / "store")
    assert len(prepare(write_rows(both), chatml_tokenizer, tmp_path / "store", format="messages")) == 12
    with pytest.raises(DataError, match="`format` is 'mesages'; allowed: auto, .*did you mean 'messages'"):
        prepare(tmp_path / "nothing.jsonl", chatml_tokenizer, tmp_path / "other", format="mesages")


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_proc", 0), ("num_proc", True), ("num_proc", "2"), ("seed", 1.5), ("seed", None), ("max_seq_len", 0),
     ("train_on", "user,"), ("on_overflow", "cut"), ("preprocess", "nothing"), ("preprocess", 3)],
)  # fmt: skip
def test_arguments(write_rows, small_chats, chatml_tokenizer, tmp_path, field, value):
    """An argument that is invalid is named, before anything is read or written."""
    with pytest.raises(DataError, match=field):
        prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", **{field: value})
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("on_overflow", ["truncate", "split"])
def test_overflow(write_rows, small_chats, chatml_tokenizer, tmp_path, on_overflow):
    """Rows that are too long are cut or split, and the accounting has the tokens that this lost."""
    whole = [tokenize(row, chatml_tokenizer) for row in small_chats]
    limit = sorted(map(len, whole))[6]
    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", max_seq_len=limit, on_overflow=on_overflow)
    assert store.lengths.max() == limit
    books = store.accounting
    assert books.tokens_read == sum(map(len, whole))
    assert books.tokens_kept == store.lengths.sum()
    assert books.samples == len(store)
    for i in range(len(store)):
        row = int(store.source(i).split(":")[1]) - 1
        text = bytes(whole[row].input_ids.astype("<i4"))
        assert bytes(store[i].input_ids.astype("<i4")) in text
    if on_overflow == "split":
        assert books.samples > books.kept
    with pytest.raises(DataError, match=r"train.jsonl:\d+: \d+ tokens, and `max_seq_len` is"):
        prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "none", max_seq_len=limit, on_overflow="error")


def test_preprocess(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A row becomes what the function returns: itself, several, or none, each counted under the row's number."""

    def function(fields):
        count = len(fields["messages"][1]["content"].split())
        return None if count == 1 else [fields] * 2 if count == 2 else fields

    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", preprocess=function)
    rows = [int(store.source(i).split(":")[1]) for i in range(len(store))]
    assert rows == [2, 2, *range(3, 13)]
    books = store.accounting
    assert (books.read, books.kept, books.dropped) == (13, 12, {"preprocess": 1})
    assert list(store.dropped()) == [
        {"file": "train.jsonl", "row": 1, "reason": "preprocess", "tokens": 0, "place": "train.jsonl:1"}
    ]


def test_several_sources_with_weights(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """Sources keep the order given; each sample knows its own, each source its weight."""
    paths = {str(write_rows(small_chats[:5], "b.jsonl")): 0.75, str(write_rows(small_chats[5:], "a.jsonl")): 0.25}
    store = prepare(paths, chatml_tokenizer, tmp_path / "store")
    assert store.sources.tolist() == [0] * 5 + [1] * 7
    assert store.weights == [0.75, 0.25]
    assert (store.source(0), store.source(11)) == ("b.jsonl:1", "a.jsonl:7")


def test_preferences(write_rows, chatml_tokenizer, chat, tmp_path):
    """A preference is two samples that stay together, in a split too; both are dropped where one is too long."""
    rows = [{"prompt": chat(("user", f"q {n}"))["messages"], "chosen": chat(("assistant", "yes " * n))["messages"],
             "rejected": chat(("assistant", "no"))["messages"]} for n in range(1, 9)]  # fmt: skip
    store = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store")
    assert store.kind == "preference"
    assert store.pairs.tolist() == [[2 * i, 2 * i + 1] for i in range(8)]
    assert [store.source(i) for i in store.pairs[3]] == ["train.jsonl:4"] * 2
    train, held_out = store.split(0.25, seed=1)
    assert (len(train.pairs), len(held_out.pairs)) == (6, 2)
    limit = int(store.lengths[10])
    shorter = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "shorter", max_seq_len=limit)
    assert shorter.accounting.kept * 2 == len(shorter) == shorter.accounting.samples < 16
    assert len(shorter.pairs) == shorter.accounting.kept


def test_unpaired_preferences(write_rows, chatml_tokenizer, tmp_path):
    """An answer and whether it is wanted."""
    rows = [{"prompt": f"q {n} ", "completion": "a", "label": n % 2 == 0} for n in range(6)]
    store = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store")
    assert store.kind == "unpaired_preference"
    assert store.desirable.tolist() == [True, False] * 3
    assert store.select([1, 2]).desirable.tolist() == [False, True]


def test_lint_is_kept(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """The store holds the findings of preparing, with the number of rows."""
    store = prepare(write_rows([*small_chats, small_chats[0]]), chatml_tokenizer, tmp_path / "store")
    assert store.lint.rows == 13
    assert store.lint.counts["duplicate_row"] >= 1


def test_seed(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A split without a seed uses the store's."""
    one = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "one", seed=1)
    two = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "two", seed=2)
    assert one.split(0.5)[1].fingerprint == two.split(0.5, seed=1)[1].fingerprint != two.split(0.5)[1].fingerprint


def test_a_link_to_where_the_store_is_to_be(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A link stays a link, to the store at its target, when the store is made and made anew."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    for rows in (small_chats, small_chats[:5]):
        prepare(write_rows(rows), chatml_tokenizer, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert len(TokenStore.open(tmp_path / "real")) == len(rows)
