"""Several processes make the same bytes as one, and end when they should."""

import hashlib
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from forge_data import DataError, prepare
from forge_data.preparing import _pipeline, _workers
from forge_data.preparing._job import Processor
from forge_data.tokenizing import _batch_tokenizer
from forge_data.tokenizing._batch_tokenizer import BatchTokenizer
from forge_data.tokenizing._encoder import Encoder

FUNCTIONS = """
import os, signal, sys

def same(fields):
    print("a user's own words")
    return fields

def die(fields):
    if fields["messages"][1]["content"] == "0 1 2 3":
        os.kill(os.getpid(), signal.SIGKILL)
    return fields

def leave(fields):
    os._exit(3)
"""


@pytest.fixture
def started(monkeypatch):
    """Record the processes that are started; chunks are a row or two."""
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", 200)
    made = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr(_workers.subprocess, "Popen", Popen)
    return made


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A user's module."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "d4_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path / "own")


def digests(directory):
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_the_same_bytes(write_rows, small_chats, chatml_tokenizer, tmp_path, started, functions):
    """Every file of the store is equal for one, two and three processes and for threads, dropped rows and findings included."""
    untrained = {"messages": [{"role": "user", "content": "nobody answers"}]}
    paths = [write_rows([*small_chats, untrained] * 3), write_rows(small_chats[::-1], "more.jsonl")]
    seen = {}
    for num_proc in (1, 2, 3, None):
        store = prepare(
            paths,
            chatml_tokenizer,
            tmp_path / f"store-{num_proc}",
            num_proc=num_proc,
            max_seq_len=45,
            on_overflow="truncate",
            preprocess="d4_functions:same",
        )
        seen[num_proc] = digests(store.path)
        store.verify()
    assert seen[1] == seen[2] == seen[3] == seen[None]
    assert len(started) == 5
    assert all(process.poll() is not None for process in started)
    assert store.accounting.read == 51


@pytest.mark.slow
def test_the_first_row_at_fault(write_rows, small_chats, chatml_tokenizer, tmp_path, started):
    """The first refused row in the file is named, whichever process meets it first; nothing is left behind."""
    broken = [*small_chats, {"messages": [{"role": "bot", "content": "x"}]}, *small_chats[:2], "{broken"]
    path = write_rows(broken)
    before = sorted(tmp_path.rglob("*"))
    for num_proc in (1, 3, None):
        with pytest.raises(DataError, match=r"train.jsonl:13: field messages\[0\].role"):
            prepare(path, chatml_tokenizer, tmp_path / "store", num_proc=num_proc)
    assert sorted(tmp_path.rglob("*")) == before
    assert all(process.poll() is not None for process in started)


@pytest.mark.slow
def test_a_function_without_a_name(write_rows, small_chats, chatml_tokenizer, tmp_path, started):
    """A function that cannot be imported runs in this process, and workers tokenise what it returns."""
    here = []

    def function(fields):
        here.append(os.getpid())
        return fields if len(here) > 1 else None

    store = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", num_proc=2, preprocess=function)
    assert (len(store), set(here), len(started)) == (11, {os.getpid()}, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "expected"),
    [("die", r"was ended by signal 9 \(SIGKILL\) before its work was done; the system ends processes so when memory runs out; "
             r"use fewer"),
     ("leave", "ended with status 3 before its work was done; use fewer with `num_proc`")],
)  # fmt: skip
def test_a_worker_that_dies(write_rows, small_chats, chatml_tokenizer, tmp_path, started, functions, function, expected):
    """A killed worker is an error and never a hang; the others end and nothing is left behind."""
    path = write_rows(small_chats)
    before = sorted(tmp_path.rglob("*.jsonl"))
    with pytest.raises(DataError, match=f"a worker process of prepare {expected}"):
        prepare(path, chatml_tokenizer, tmp_path / "store", num_proc=2, preprocess=f"d4_functions:{function}")
    assert not (tmp_path / "store").exists()
    assert sorted(tmp_path.rglob("*.jsonl")) == before
    assert all(process.poll() is not None for process in started)


@pytest.mark.slow
def test_a_worker_that_cannot_start(write_rows, small_chats, chatml_tokenizer, tmp_path, started, monkeypatch):
    """A worker that never listens is an error too."""
    monkeypatch.setattr(_workers.sys, "executable", "/bin/false")
    with pytest.raises(DataError, match="ended with status 1 before its work was done"):
        prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", num_proc=2)


@pytest.mark.slow
def test_interrupted(write_rows, small_chats, chatml_tokenizer, tmp_path, started):
    """Ctrl-C ends the workers, and nothing is left behind."""
    path = write_rows(small_chats * 20)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(path, chatml_tokenizer, tmp_path / "store", num_proc=2, progress=stop)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    assert [each.name for each in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.slow
def test_a_script_without_a_main_guard(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A plain script that prepares with two processes runs once, and output of its workers stays out of its own."""
    path = write_rows(small_chats)
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            f"""
            import forge_data
            print("once")
            store = forge_data.prepare({str(path)!r}, {str(tmp_path / "model")!r}, {str(tmp_path / "store")!r}, num_proc=2)
            print(len(store))
            """
        )
    )
    done = subprocess.run([sys.executable, "-W", "error", tmp_path / "script.py"], capture_output=True, text=True)
    assert done.stdout.split() == ["once", "12"], done.stderr


def test_one_thread(write_rows, small_chats, chatml_tokenizer, tmp_path, monkeypatch):
    """One process is one thread: the tokenizer's own threads are off meanwhile, and afterwards as they were."""
    seen = []

    def recorded(job):
        process = Processor(job)
        return lambda task: seen.append(os.environ["TOKENIZERS_PARALLELISM"]) or process(task)

    monkeypatch.setattr(_workers, "Processor", recorded)
    for before in (None, "true"):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        if before:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / f"store-{before}", num_proc=1)
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before
    assert seen == ["false", "false"]


@pytest.mark.parametrize("expected", [None, "true", "false"])
def test_the_machine(write_rows, small_chats, chatml_tokenizer, tmp_path, monkeypatch, expected):
    """By default little data starts no process, TOKENIZERS_PARALLELISM holds, and the tokenizer's thread ends."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if expected:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", expected)
    monkeypatch.setattr(_pipeline, "_cores", lambda: 2)
    monkeypatch.setattr(_workers.subprocess, "Popen", None)
    seen = []
    prepare(
        write_rows(small_chats),
        chatml_tokenizer,
        tmp_path / "store",
        preprocess=lambda row: seen.append(os.environ.get("TOKENIZERS_PARALLELISM")) or row,
    )
    assert set(seen) == {expected}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("forge-data")]


def _threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("forge-data")]


def test_the_tokenizer_is_ahead(write_rows, small_chats, chatml_tokenizer, tmp_path, monkeypatch):
    """The tokenizer works on the next rows in its own thread while rows before are masked; with one process it does not.

    Nor does it where texts are tokenised from the word cache, which is Python's work.
    """
    monkeypatch.setattr(_batch_tokenizer, "word_cache", lambda tokenizer: None)
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(_pipeline, "_cores", lambda: 2)
    message = []
    ask, end = BatchTokenizer.__call__, Encoder.finish
    monkeypatch.setattr(
        BatchTokenizer, "__call__", lambda *a, **k: message.append(threading.current_thread().name) or ask(*a, **k)
    )
    begin = Encoder.begin
    monkeypatch.setattr(Encoder, "begin", lambda *a: message.append("begin") or begin(*a))
    monkeypatch.setattr(Encoder, "finish", lambda *a: message.append("finish") or end(*a))
    prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store")
    assert [each for each in message if each in ("begin", "finish")] == ["begin", *["begin", "finish"] * 11, "finish"]
    assert sum(each.startswith("forge-data-tokenizer") for each in message) == 12
    message.clear()
    prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "one", num_proc=1)
    assert [each for each in message if each in ("begin", "finish")] == ["begin", "finish"] * 12
    assert not [each for each in message if each.startswith("forge-data")]
    message.clear()
    monkeypatch.undo()
    monkeypatch.setattr(_pipeline, "_cores", lambda: 2)
    monkeypatch.setattr(
        BatchTokenizer, "__call__", lambda *a, **k: message.append(threading.current_thread().name) or ask(*a, **k)
    )
    prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "words")
    assert message
    assert not [each for each in message if each.startswith("forge-data")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_thread_is_left(write_rows, small_chats, chatml_tokenizer, tmp_path, monkeypatch, error):
    """However a preparation in this process ends, its thread ends with it, and nothing is left on disk."""
    monkeypatch.setattr(_batch_tokenizer, "word_cache", lambda tokenizer: None)
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(_pipeline, "_cores", lambda: 2)
    path = write_rows([*small_chats, {"messages": [{"role": "bot", "content": "x"}]}])
    seen = []

    def stop(done, total):
        seen.append(_threads())
        raise error

    with pytest.raises(error):
        prepare(path, chatml_tokenizer, tmp_path / "store", progress=stop)
    assert (len(seen[0]), _threads()) == (1, [])

    def fails(*arguments, **named):
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(BatchTokenizer, "__call__", fails)
        prepare(path, chatml_tokenizer, tmp_path / "store")
    assert _threads() == []
    with pytest.raises(DataError, match="train.jsonl:13"):
        prepare(path, chatml_tokenizer, tmp_path / "store")
    assert _threads() == []
    assert [each.name for each in tmp_path.iterdir()] == ["train.jsonl"]
