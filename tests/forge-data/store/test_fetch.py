"""Stores at a URL: fetched once, verified while they are, and opened like any other."""

import hashlib
import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import fsspec
import pytest

from forge_data import PromptStore, StoreError, TokenStore, prepare, prepare_prompts
from forge_data.cli._parser import main
from forge_data.store import _fetch

URL = "memory://bucket/store"


@pytest.fixture
def remote(chatml_tokenizer, small_chats, write_rows, tmp_path):
    """A store in fsspec's memory, and the same on the disk."""
    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", progress=False)
    system = fsspec.filesystem("memory")
    system.put(f"{store.path}/", "/bucket/store/", recursive=True)
    yield store
    # Not by `rm(recursive=True)`, which in early versions of fsspec leaves folders in a wrong order; these find folders too.
    for file in system.find("/bucket"):
        with suppress(FileNotFoundError):
            system.rm_file(file)


def files(folder):
    """Names of all files below a folder but locks."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"
    )


def test_a_store_is_fetched_once(remote, tmp_path, monkeypatch):
    """It holds the same; a second opening reads store.json only; one prepared anew at the same URL is fetched again."""
    store = TokenStore.open(URL, cache_dir=tmp_path / "cache")
    assert store.fingerprint == remote.fingerprint
    assert [example.labels.tolist() for example in store] == [example.labels.tolist() for example in remote]
    assert files(store.path) == files(remote.path)
    store.verify()
    opened, original = [], fsspec.implementations.memory.MemoryFileSystem._open
    monkeypatch.setattr(
        fsspec.implementations.memory.MemoryFileSystem,
        "_open",
        lambda self, path, *rest, **more: opened.append(path) or original(self, path, *rest, **more),
    )
    assert TokenStore.open(f"{URL}/", cache_dir=tmp_path / "cache").path == store.path
    assert opened in (["/bucket/store/store.json"], [])
    with fsspec.filesystem("memory").open("/bucket/store/store.json", "ab") as file:
        file.write(b"\n")
    assert TokenStore.open(URL, cache_dir=tmp_path / "cache").path != store.path


def test_many_processes_fetch_it_once(remote, tmp_path, monkeypatch):
    """Openings at the same time wait for the first one's files."""
    fetches, original = [], _fetch._fetch
    monkeypatch.setattr(_fetch, "_fetch", lambda *words: fetches.append(1) or original(*words))
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda _: TokenStore.open(URL, cache_dir=tmp_path / "cache"), range(4)))
    assert len({store.path for store in stores}) == 1
    assert len(fetches) == 1


def test_by_default_it_is_in_the_users_temporary_folder(remote, tmp_path, monkeypatch, capsys):
    """Nobody else may read or write there; the commands take a URL too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    store = TokenStore.open(URL)
    assert store.path.parent.parent == tmp_path / "tmp"
    assert store.path.parent.stat().st_mode & 0o777 == 0o700
    assert main(["show", URL, "3"]) == 0
    assert "train.jsonl:4 · sample 3" in capsys.readouterr().out
    assert main(["stats", URL]) == 0


@pytest.mark.parametrize("damage", ["bit flipped", "shortened", "missing"])
def test_what_was_damaged_is_never_opened(remote, damage, tmp_path):
    """A file that does not hold what was written is named with both hashes, and nothing is kept of the store."""
    system, path = fsspec.filesystem("memory"), "/bucket/store/loss_mask.bin"
    mask = bytearray(system.cat_file(path))
    if damage == "missing":
        system.rm(path)
    else:
        mask[2] ^= 1
        system.pipe_file(path, bytes(mask if damage == "bit flipped" else mask[:-1]))
    message = "could not be fetched" if damage == "missing" else r"loss_mask\.bin does not hold .* SHA-256 is [0-9a-f]{64}, and"
    with pytest.raises(StoreError, match=message):
        TokenStore.open(URL, cache_dir=tmp_path / "cache")
    assert files(tmp_path / "cache") == []
    system.pipe_file(path, (remote.path / "loss_mask.bin").read_bytes())
    TokenStore.open(URL, cache_dir=tmp_path / "cache").verify()


def test_what_is_no_store_is_refused(remote, tmp_path):
    """A URL without a store, of another protocol, or of another kind of store, and names that lead out of it."""
    system = fsspec.filesystem("memory")
    cases = [
        ("memory://bucket/nothing", r"is not a token store: it holds no store\.json"),
        ("gopher://bucket/store", "cannot be opened"),
    ]
    for url, message in cases:
        with pytest.raises(StoreError, match=message):
            TokenStore.open(url, cache_dir=tmp_path / "cache")
    with pytest.raises(StoreError, match="is a store of samples; open it as a TokenStore"):
        PromptStore.open(URL, cache_dir=tmp_path / "cache")
    manifest = system.cat_file("/bucket/store/store.json")
    for text, message in ((b"[1]", "belongs to another program"), (b"{", "cannot be read")):
        system.pipe_file("/bucket/store/store.json", text)
        with pytest.raises(StoreError, match=message):
            TokenStore.open(URL, cache_dir=tmp_path / "cache")
    for name in (b'"../out"', b'"/tmp/out"'):
        system.pipe_file("/bucket/store/store.json", manifest.replace(b'"dropped.jsonl"', name))
        with pytest.raises(StoreError, match="is damaged"):
            TokenStore.open(URL, cache_dir=tmp_path / "cache")
    with pytest.raises(StoreError, match="no store can be fetched to"):
        (tmp_path / "file").write_text("")
        TokenStore.open(URL, cache_dir=tmp_path / "file")


def test_prompts_are_fetched_too(chatml_tokenizer, write_rows, tmp_path):
    """A store of prompts opens from a URL."""
    prompts = prepare_prompts(write_rows([{"prompt": "who?"}]), chatml_tokenizer, tmp_path / "prompts")
    fsspec.filesystem("memory").put(f"{prompts.path}/", "/bucket/prompts/", recursive=True)
    shutil.rmtree(prompts.path)
    fetched = PromptStore.open("memory://bucket/prompts", cache_dir=tmp_path / "cache")
    assert fetched[0].prompt == "who?"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


@pytest.mark.parametrize("name", ["../../outside.txt", "/outside.txt"])
def test_nothing_is_written_outside(name, remote, tmp_path):
    """A store.json that names a file elsewhere is damaged, with or without a size; nothing of it is fetched."""
    system, place = fsspec.filesystem("memory"), "/bucket/store/store.json"
    fields = json.loads(system.cat_file(place))
    name = str(tmp_path) + name if name.startswith("/") else name
    fields["sha256"][name] = hashlib.sha256(b"text").hexdigest()
    system.pipe_file(place, json.dumps(fields).encode())
    system.pipe_file("/outside.txt", b"text")
    system.pipe_file(f"/bucket/store/{name}", b"text")
    with pytest.raises(StoreError, match="a file outside the store is named"):
        TokenStore.open(URL, cache_dir=tmp_path / "deep" / "cache")
    assert not list(tmp_path.rglob("outside.txt"))
