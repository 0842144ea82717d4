"""What killed processes left beside a store: theirs is removed, others' stays."""

import os
import subprocess
import sys

import pytest

import forge_data
from forge_data.store import _partial as _leftovers
from forge_data.store._partial import partial_of, remove_leftovers, worker_directory

pytestmark = pytest.mark.skipif(os.name != "posix", reason="elsewhere nothing is removed")


@pytest.fixture(scope="module")
def gone():
    """Number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def of(path, process):
    """Return the name that a process would have used."""
    return path.with_name(partial_of(path).name.replace(f".{os.getpid()}-", f".{process}-"))


def test_of_a_process_that_is_gone(tmp_path, gone):
    """The directory of an ended process is removed, with its contents."""
    left = of(tmp_path / "store", gone)
    left.mkdir()
    (left / "input_ids.bin").write_bytes(b"1234")
    remove_leftovers(tmp_path / "store")
    assert not left.exists()


def test_what_stays(tmp_path, gone, monkeypatch):
    """Those of a running process, another store, another machine, a replaced store, a link and a file stay."""
    store = tmp_path / "store"
    left = of(store, gone)
    stay = [partial_of(store), of(store, os.getppid()), of(tmp_path / "store.2", gone), of(tmp_path / "other", gone)]
    stay += [left.with_name(f"{left.name}.replaced-0"), tmp_path / f".store.{gone}-0123abcd.partial"]
    monkeypatch.setattr(_leftovers, "_machine", lambda: "0123abcd")
    stay.append(of(store, gone))
    monkeypatch.undo()
    for path in stay:
        path.mkdir()
    (link := of(store, gone)).symlink_to(stay[0])
    (file := of(store, gone)).write_text("mine")
    remove_leftovers(store)
    assert all(path.exists() for path in (*stay, link, file))


def test_prepare_removes_them(tmp_path, gone, write_rows, chat, chatml_tokenizer):
    """The next preparation of the store removes them, and leaves only the store."""
    place = tmp_path / "here"
    place.mkdir()
    of(place / "store", gone).mkdir()
    forge_data.prepare(
        write_rows([chat(("user", "Hi"), ("assistant", "Hello"))]), chatml_tokenizer, place / "store", progress=False
    )
    assert [path.name for path in place.iterdir()] == ["store"]


def test_a_store_that_is_used_again(tmp_path, gone, write_rows, chat, chatml_tokenizer):
    """They are removed also where the existing store is opened again."""
    place = tmp_path / "here"
    rows = write_rows([chat(("user", "Hi"), ("assistant", "Hello"))])
    forge_data.prepare(rows, chatml_tokenizer, place / "store", progress=False)
    of(place / "store", gone).mkdir()
    forge_data.prepare(rows, chatml_tokenizer, place / "store", progress=False)
    assert [path.name for path in place.iterdir()] == ["store"]


def test_where_workers_met(tmp_path, gone, monkeypatch):
    """The workers' directory of an ended process is removed by the next; those of running ones, and of others, stay."""
    monkeypatch.setattr(_leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(_leftovers.tempfile, "tempdir", str(tmp_path))
    with worker_directory() as mine:
        left = tmp_path / os.path.basename(mine).replace(f".{os.getpid()}-", f".{gone}-")
        left.mkdir()
        (left / "socket").write_text("")
        others = [tmp_path / "forge-data-abc123", left.with_name(left.name.replace("forge-data", "other"))]
        for path in others:
            path.mkdir()
        with worker_directory():
            assert not left.exists()
            assert os.path.isdir(mine)
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.slow
def test_a_killed_preparation(tmp_path, write_rows, chat, chatml_tokenizer):
    """`kill -9` in the middle of a preparation leaves the name that the next one searches for."""
    rows = write_rows([chat(("user", "Hi"), ("assistant", "Hello"))])
    model = tmp_path / "model"
    chatml_tokenizer.save_pretrained(model)
    place = tmp_path / "here"
    place.mkdir()
    code = f"""
import os, signal, forge_data
def kill(row):
    os.kill(os.getpid(), signal.SIGKILL)
forge_data.prepare({str(rows)!r}, {str(model)!r}, {str(place / "store")!r}, preprocess=kill, num_proc=1, progress=False)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    if os.path.exists(place / "store") or not list(place.iterdir()):
        pytest.fail("nothing was left: the process was killed in another place than was meant")
    forge_data.prepare(rows, model, place / "store", progress=False)
    assert [path.name for path in place.iterdir()] == ["store"]
