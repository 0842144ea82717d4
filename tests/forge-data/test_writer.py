"""Writing a store: the disk's refusals."""

import os

import numpy as np
import pytest

from forge_data import Accounting, StoreError, TokenizedExample, TokenStore
from forge_data._format import SourceFile
from forge_data._writer import StoreWriter

EXAMPLE = TokenizedExample(np.array([1, 2], dtype=np.int32), np.array([-100, 2], dtype=np.int32))
BOOKS = ([SourceFile("a", "/a", 1)], Accounting(1, 1), {})


def test_left_without_commit(tmp_path):
    """A writer that is left without commit was never there."""
    with StoreWriter(tmp_path / "store") as writer:
        writer.add([EXAMPLE], [1])
        assert [path.name.endswith(".partial") for path in tmp_path.iterdir()] == [True]
    assert list(tmp_path.iterdir()) == []


def test_permissions(tmp_path):
    """The store is as readable as any directory made here: a temporary name leaves no private mode behind."""
    (tmp_path / "plain").mkdir()
    with StoreWriter(tmp_path / "store") as writer:
        writer.add([EXAMPLE], [1])
        writer.commit(*BOOKS)
    assert (tmp_path / "store").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_somebody_was_faster(tmp_path):
    """If the directory is filled meanwhile, it is left alone and nothing of ours stays."""
    with pytest.raises(StoreError, match="could not be finished"), StoreWriter(tmp_path / "store") as writer:
        writer.add([EXAMPLE], [1])
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "theirs").touch()
        writer.commit(*BOOKS)
    assert [path.name for path in tmp_path.rglob("*")] == ["store", "theirs"]


def test_full_disk(tmp_path, monkeypatch):
    """A disk that is full is named with the system's reason, and nothing stays."""
    with (
        pytest.raises(StoreError, match="could not be written: No space left"),
        StoreWriter(tmp_path / "new" / "store") as writer,
    ):

        def full(*_):
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(writer, "_write", full)
        writer.add([EXAMPLE], [1])
    assert list(tmp_path.iterdir()) == []


def test_sources_in_order(tmp_path):
    """With several sources, each sample is found in its own: samples stand in the order of the sources."""
    with StoreWriter(tmp_path / "store") as writer:
        writer.add([EXAMPLE] * 3, [5, 9, 2])
        writer.add([], [])
        writer.commit([SourceFile("a", "/a", 2), SourceFile("b", "/b", 1)], Accounting(3, 3), {})
    store = TokenStore.open(tmp_path / "store")
    assert [store.source(i) for i in range(3)] == ["a:5", "a:9", "b:2"]
