"""Names of files that would control a terminal, wherever they are printed."""

import json

import pytest

import forge_data
from forge_data.cli import _parser

NAME = "a\x1b[31m\u202eb\n.jsonl"
SHOWN = r"a\x1b[31m\u202eb\n.jsonl"
HARMFUL = ("\x1b", "\u202e", "\n.jsonl")


@pytest.fixture
def hostile(write_rows, chat):
    """A file of such a name, with a row that is kept, one with a finding and one that is dropped."""
    rows = [("assistant", "ho"), ("assistant", ""), ("user", "?")]
    return write_rows([chat(("user", "hi"), turn) for turn in rows], NAME)


def harmless(text):
    """Whether a text names the file, and holds nothing of its name that controls a terminal."""
    return SHOWN in text and not any(sign in text for sign in HARMFUL)


def test_logs_findings_and_the_viewer(hostile, chatml_tokenizer, tmp_path, logged, capsys, monkeypatch):
    """Logs, places, findings, samples, dropped rows and statistics name the file with escapes."""
    monkeypatch.setenv("NO_COLOR", "1")
    messages = logged()
    store = forge_data.prepare(hostile, chatml_tokenizer, tmp_path / "store", progress=False)
    assert harmless(messages[0])
    assert harmless(store.source(0))
    assert harmless(store.lint.findings[0].place)
    assert all(harmless(row["place"]) for row in store.dropped())
    for words in (["show", str(store.path)], ["stats", str(store.path)], ["lint", str(store.path)]):
        capsys.readouterr()
        _parser.main(words)
        assert harmless(capsys.readouterr().out), words
    assert _parser.main(["show", str(store.path), f"{SHOWN}:1"]) == 0


def test_errors(write_rows, chatml_tokenizer, tmp_path, capsys):
    """An error by row and one by file are each one line without control characters."""
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    broken = write_rows(["{"], NAME)
    for data in (broken, tmp_path / f"missing{NAME}"):
        words = ["prepare", str(data), "--tokenizer", str(tmp_path / "model"), "--store-dir", str(tmp_path / "store")]
        assert _parser.main(words) == 2
        said = capsys.readouterr().err
        assert harmless(said.removesuffix("\n"))
        assert said.count("\n") == 1


def test_a_store_from_elsewhere(hostile, chatml_tokenizer, tmp_path, capsys):
    """A name that somebody wrote into a store's own file is no better."""
    store = forge_data.prepare(hostile, chatml_tokenizer, tmp_path / "store", progress=False)
    manifest = json.loads((store.path / "store.json").read_text())
    manifest["sources"][0]["name"] = NAME
    (store.path / "store.json").write_text(json.dumps(manifest))
    assert harmless(forge_data.TokenStore.open(store.path).source(0))
