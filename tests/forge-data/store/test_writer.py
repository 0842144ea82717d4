"""Writing a store: all of it or nothing, whatever the disk does."""

import json
import os

import numpy as np
import pytest

from forge_data import Accounting, StoreError, TokenStore, prepare
from forge_data.store._dropped import Dropped
from forge_data.store._manifest import SourceFile
from forge_data.store._writer import StoreWriter

from ..stores import arrays, write


def test_left_without_commit(tmp_path):
    """A writer that is left without commit leaves nothing."""
    with StoreWriter(tmp_path / "store") as writer:
        writer.add(arrays([1]))
        assert [path.name.endswith(".partial") for path in tmp_path.iterdir()] == [True]
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "store", commit=False)
    assert list(tmp_path.iterdir()) == []


def test_batches_are_joined(tmp_path):
    """Several batches are stored as one would be."""
    write(tmp_path / "one", [1, 2, 3])
    with StoreWriter(tmp_path / "several") as writer:
        for rows in ([1], [], [2, 3]):
            writer.add(arrays(rows))
        manifest = writer.finish(
            "supervised", [SourceFile("a", "/a", 3)], Accounting(3, 3, {}, 3, 6, 6), tokenizer=None, inputs="x", settings={}
        )
        writer.commit(manifest, '{"findings": []}\n')
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "several" / path.name).read_bytes(), path.name


def test_permissions(tmp_path):
    """The store has the permissions of any directory made here, not a temporary one's."""
    (tmp_path / "plain").mkdir()
    write(tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_somebody_was_faster(tmp_path):
    """If the directory is filled with something else meanwhile, it is left alone and nothing of the writer stays."""

    def theirs(_):
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "theirs").touch()

    with pytest.raises(StoreError, match="could not be finished"):
        write(tmp_path / "store", before=theirs)
    assert [path.name for path in tmp_path.rglob("*")] == ["store", "theirs"]


@pytest.mark.parametrize("call", ["add", "drop"])
def test_full_disk(tmp_path, monkeypatch, call):
    """A full disk is reported with the system's reason, and nothing stays."""
    with (
        pytest.raises(StoreError, match="could not be written: No space left on device; its disk is full: make room"),
        StoreWriter(tmp_path / "new" / "store") as writer,
    ):

        def full(*_):
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(writer, "_append", full)
        writer.add(arrays([1])) if call == "add" else writer.drop("a", [Dropped(1, "x", 2)], indexed=False)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_for_the_tokenizer(write_rows, small_chats, chatml_tokenizer, tmp_path, monkeypatch):
    """The library that writes tokenizer.json raises a bare Exception on a full disk; it is reported as others are."""

    def full(*_, **__):
        raise Exception("No space left on device (os error 28)")  # noqa: TRY002 - as the library has it

    monkeypatch.setattr(chatml_tokenizer, "save_pretrained", full)
    with pytest.raises(
        StoreError, match=r"the tokenizer could not be written to .*: No space left on device .*; its disk is full: "
    ):
        prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "new" / "store", progress=False)
    assert not (tmp_path / "new").exists()


def test_sources_in_order(tmp_path):
    """With several sources, each sample is found in its own, in the order of the sources."""
    sources = [SourceFile("a", "/a", 2), SourceFile("empty", "/e", 0, 1), SourceFile("b.json", "/b", 1, 2, indexed=True)]
    store = write(tmp_path / "store", [5, 9, 2], sources=sources)
    assert [store.source(i) for i in range(3)] == ["a:5", "a:9", "b.json[2]"]
    assert store.sources.tolist() == [0, 0, 2]
    assert store.weights is None


def test_weights(tmp_path):
    """Weights belong to the entries of data_path, each of one or several files."""
    sources = [SourceFile("a", "/a", 1, 0, 0.7), SourceFile("b", "/b", 1, 0, 0.7), SourceFile("c", "/c", 1, 1, 0.3)]
    store = write(tmp_path / "store", [1, 1, 1], sources=sources)
    assert store.sources.tolist() == [0, 0, 1]
    assert store.weights == [0.7, 0.3]
    assert store.select([2, 0]).sources.tolist() == [1, 0]


def test_preferences(tmp_path):
    """Two samples a row are a pair; the same tokens as pairs have another fingerprint than as single samples."""
    store = write(tmp_path / "pairs", [1, 2], kind="preference", sides=2)
    assert store.kind == "preference"
    assert store.pairs.tolist() == [[0, 1], [2, 3]]
    assert store.pairs.dtype == np.int64
    assert store.select([3, 0, 2, 1]).pairs.tolist() == [[1, 3], [2, 0]]
    assert store.accounting.samples == 4
    assert store.fingerprint != write(tmp_path / "plain", [1, 1, 2, 2]).fingerprint
    with pytest.raises(StoreError, match="one side of a preference"):
        _ = store.select([0]).pairs
    with pytest.raises(StoreError, match="which are desirable is known of unpaired"):
        _ = store.desirable


def test_unpaired_preferences(tmp_path):
    """Whether an answer is wanted is in a file of its own, and part of the fingerprint."""
    wanted = write(tmp_path / "yes", [1, 2], kind="unpaired_preference", desirable=True)
    unwanted = write(tmp_path / "no", [1, 2], kind="unpaired_preference", desirable=False)
    assert wanted.desirable.tolist() == [True, True]
    assert unwanted.select([1]).desirable.tolist() == [False]
    assert wanted.fingerprint != unwanted.fingerprint
    with pytest.raises(StoreError, match="holds unpaired_preference samples, so it has no pairs"):
        _ = wanted.pairs


def test_dropped_rows_are_listed(tmp_path):
    """Dropped rows are a line each, names that are not UTF-8 included."""
    with StoreWriter(tmp_path / "store") as writer:
        writer.add(arrays([2]))
        writer.drop("ä\udcff.jsonl", [Dropped(1, "no_trained_token", 7), Dropped(3, "preprocess", 0)], indexed=False)
        writer.drop("b.json", [Dropped(0, "preprocess", 0)], indexed=True)
        manifest = writer.finish(
            "supervised",
            [SourceFile("a", "/a", 1)],
            Accounting(3, 1, {"x": 2}, 1, 9, 2, {"x": 7}),
            tokenizer=None,
            inputs=None,
            settings={},
        )
        writer.commit(manifest, '{"findings": []}\n')
    assert list(TokenStore.open(tmp_path / "store").dropped()) == [
        {"file": "ä\udcff.jsonl", "row": 1, "reason": "no_trained_token", "tokens": 7, "place": "ä\udcff.jsonl:1"},
        {"file": "ä\udcff.jsonl", "row": 3, "reason": "preprocess", "tokens": 0, "place": "ä\udcff.jsonl:3"},
        {"file": "b.json", "row": 0, "reason": "preprocess", "tokens": 0, "place": "b.json[0]"},
    ]
    message = json.loads((tmp_path / "store" / "store.json").read_text())
    assert message["sizes"]["dropped.jsonl"] == (tmp_path / "store" / "dropped.jsonl").stat().st_size
