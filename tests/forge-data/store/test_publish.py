"""A finished store gets its name: an existing store makes room, anything else stays."""

import json
import threading
from pathlib import Path

import pytest

from forge_data import StoreError, TokenStore
from forge_data.store import _files
from forge_data.store._publish import require_room

from ..stores import write


def test_a_store_makes_room(tmp_path):
    """A store is replaced by the new one, and nothing is left beside it."""
    old = write(tmp_path / "store", [1, 2])
    new = write(tmp_path / "store", [1, 2, 3])
    assert (len(old), len(new), len(TokenStore.open(tmp_path / "store"))) == (2, 3, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    # What was mapped stays readable for those who still read it.
    assert old[1].input_ids.tolist() == [1, 2]


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path):
    """The old store is there while the new one is written, and if it never is finished."""
    write(tmp_path / "store", [1, 2])
    seen = []
    write(tmp_path / "store", [1], commit=False, before=lambda _: seen.append(len(TokenStore.open(tmp_path / "store"))))
    assert seen == [2]
    assert len(TokenStore.open(tmp_path / "store")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_an_empty_directory_is_filled(tmp_path):
    """An empty directory may be used."""
    (tmp_path / "store").mkdir()
    assert len(write(tmp_path / "store")) == 1


def test_brackets_are_no_store(tmp_path):
    """A store.json that is nested deeper than Python follows belongs to somebody else."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "store.json").write_text("[" * 100_000)
    with pytest.raises(StoreError, match="taken exists already and is not a token store"):
        write(tmp_path / "taken")


@pytest.mark.parametrize("name", ["thesis.tex", "deep/thesis.tex", "store.json"])
def test_what_is_no_store_stays(tmp_path, name):
    """A directory with other things is refused and left as it is, and so is another program's store.json."""
    path = tmp_path / "taken" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"years": "of work"}')
    with pytest.raises(StoreError, match="taken exists already and is not a token store; give a new directory"):
        write(tmp_path / "taken")
    assert path.read_text() == '{"years": "of work"}'
    with pytest.raises(StoreError, match="exists already and is no directory"):
        write(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "names no directory that can be made"),
        ("x/..", "names no directory that can be made"),
        ("x" * 300, "can hold no token store: .*File name too long"),
        ("a\0b", "can hold no token store: .*null (byte|character)"),
        ("a\udcffb", "can hold no token store: .*surrogates not allowed"),
    ],
)
def test_no_such_place(tmp_path, monkeypatch, name, expected):
    """An impossible directory name is one clear error, before anything is read."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=expected):
        require_room(Path(name))


def test_a_strangers_file_in_a_store(tmp_path):
    """A user's file inside a store would be lost with it: it is named, and the store stays."""
    write(tmp_path / "store")
    (tmp_path / "store" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"holds 'notes.txt' beside the token store, which would be lost; move it away"):
        write(tmp_path / "store", [1, 2])
    assert (tmp_path / "store" / "notes.txt").read_text() == "mine"


def test_a_torn_store_is_for_a_person(tmp_path):
    """A torn store is named and stays, for a person to examine."""
    write(tmp_path / "store")
    (tmp_path / "store" / "rows.bin").write_bytes(b"")
    with pytest.raises(StoreError, match=r"rows.bin is torn: 0 bytes where 8 bytes were written; remove the directory"):
        require_room(tmp_path / "store")


def test_an_older_version_makes_room(tmp_path):
    """A store of an older version is replaced, whatever its files are called."""
    write(tmp_path / "store")
    message = json.loads((tmp_path / "store" / "store.json").read_text())
    (tmp_path / "store" / "store.json").write_text(json.dumps(message | {"version": 1}))
    with pytest.raises(
        StoreError, match="has format version 1, this forge-data reads 2 and 3 and 4 and 5 and 6 and 7; prepare it again"
    ):
        TokenStore.open(tmp_path / "store")
    assert len(write(tmp_path / "store", [1, 2])) == 2


@pytest.mark.slow
def test_readers_see_one_or_the_other(tmp_path):
    """While stores replace each other, every reader gets a whole one: never none, never parts of two."""
    write(tmp_path / "store", [1])
    stop = threading.Event()
    seen, failed = [], []

    def read():
        while not stop.is_set():
            try:
                store = TokenStore.open(tmp_path / "store")
                seen.append(len(store))
                rows = [store.source(i) for i in range(len(store))]
                assert rows == [f"a:{i + 1}" for i in range(len(store))]
                assert len(store.lengths) == len(store)
            except Exception as error:
                failed.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(60):
        write(tmp_path / "store", list(range(1, 2 + turn % 5)))
    stop.set()
    for reader in readers:
        reader.join()
    assert failed == []
    assert len(set(seen)) > 1


def test_two_writers(tmp_path):
    """Several writers at one place: each finishes or fails with an error, and a whole store is there in the end."""
    failed = []

    def put(size):
        for _ in range(15):
            try:
                write(tmp_path / "store", list(range(1, size + 1)))
            except StoreError as error:
                failed.append(error)

    writers = [threading.Thread(target=put, args=(size,)) for size in (1, 2, 3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(TokenStore.open(tmp_path / "store")) in (1, 2, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert failed == []


def test_a_replacement_ends_while_it_is_looked_for(tmp_path, monkeypatch):
    """A reader that finds nothing, and then no trace of a replacement since it just ended, looks again."""
    write(tmp_path / "store", [1, 2])
    (tmp_path / "store").rename(tmp_path / "moved")

    def ended(path):
        (tmp_path / "moved").rename(path)
        return False

    monkeypatch.setattr(_files, "_being_replaced", ended)
    assert len(TokenStore.open(tmp_path / "store")) == 2
