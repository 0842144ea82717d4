"""Prompts on a terminal, by the function and the command line."""

import json
import re

import pytest

import forge_data
from forge_data.cli import _parser as _cli

ROWS = [
    {"prompt": "count\tto 3", "answer": "1\x1b[31m", "more": {"é": [None, 0.5]}},
    {"prompt": ""},
    {"messages": [{"role": "user", "content": "who?"}]},
]


@pytest.fixture
def store(write_rows, chatml_tokenizer, tmp_path):
    return forge_data.prepare_prompts(write_rows(ROWS), chatml_tokenizer, tmp_path / "store")


def printed(capsys):
    written = capsys.readouterr()
    return written.out, written.err


@pytest.mark.parametrize("how", ["object", "directory", "verb"])
def test_show(store, how, capsys):
    """Prompts are shown token by token with further fields, dropped rows and the fingerprint; no control character reaches the
    terminal."""
    match how:
        case "verb":
            assert _cli.main(["show", str(store.path)]) == 0
        case "directory":
            forge_data.show(store.path)
        case _:
            forge_data.show(store)
    out, _ = printed(capsys)
    assert f"train.jsonl:1 · prompt 0 · {len(store[0])} tokens\nprompt    count⇥to·3\n  answer: " in out
    assert '  more: {"é": [null, 0.5]}\n' in out
    assert "⟪<|im_start|>⟫user↵\n          who?⟪<|im_end|>⟫↵\n          ⟪<|im_start|>⟫assistant↵" in out
    assert "\x1b" not in out
    assert "kept 2 of 3 rows; dropped 1 empty_prompt\n  train.jsonl:2 empty_prompt\n" in out
    assert f"fingerprint {store.fingerprint}" in out
    assert "0 learned" not in out


def test_page(store, tmp_path, capsys):
    """A page shows prompts token by token with further fields, and neither findings nor a loss."""
    assert _cli.main(["show", str(store.path), "--html", str(tmp_path / "page.html")]) == 0
    assert printed(capsys)[0] == f"{tmp_path / 'page.html'}\n"
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = json.loads(re.search('id="data">(.*?)</script>', text)[1])
    assert data["noun"] == "prompt"
    assert data["samples"][0]["columns"] == [["answer", '"1\\u001b[31m"'], ["more", '{"é": [null, 0.5]}']]
    assert "All 2 prompts, token by token, as the model is asked." in text
    assert "store: prompts</title>" in text
    assert "train.jsonl:2" in text, "rows left out"
    assert "Tokens in the loss" not in text
    assert "<b>Findings" not in text
    assert "  answer: " in text.partition("<noscript>")[2], "without scripts too"


def test_show_some(store, capsys):
    """Rows are chosen as of any store."""
    assert _cli.main(["show", str(store.path), "train.jsonl:3"]) == 0
    assert "prompt 1" in (out := printed(capsys)[0])
    assert "prompt 0" not in out


def test_stats(store, capsys):
    """Prompts are counted, without learned tokens."""
    assert _cli.main(["stats", str(store.path)]) == 0
    out, _ = printed(capsys)
    assert out.startswith(f"2 prompts, {int(store.lengths.sum())} tokens\nkept 2 of 3 rows")
    assert "tokens a prompt" in out
    counted = forge_data.stats(store.select([1]))
    assert (counted.kind, counted.samples, counted.tokens, counted.learned) == ("prompts", 1, len(store[1]), 0)
    assert [(share.name, share.samples, share.tokens) for share in counted.sources] == [("train.jsonl", 1, len(store[1]))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lint", "STORE"], "is a store of prompts: nothing of them is learned, so there is nothing to lint"),
        (["show", "STORE", "--finding", "empty_turn"], "is a store of prompts, which are not linted; leave --finding out"),
        (["show", "STORE", "7"], "no sample 7: the store has 0 to 1"),
    ],
)
def test_refused_by_name(store, words, message, capsys):
    """Commands that a store of prompts does not support are refused in one line, with status 2."""
    assert _cli.main([str(store.path) if word == "STORE" else word for word in words]) == 2
    out, err = printed(capsys)
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    with pytest.raises(forge_data.DataError, match="nothing of them is learned, so there is nothing to lint"):
        forge_data.lint(store)
