"""`show`: a store on a terminal."""

import io

import numpy as np
import pytest

import forge_data
from forge_data.findings._finding import Finding
from forge_data.viewing._show import plain, text_of, wants_colour, write_line

from ..viewed import FINGERPRINT, Store, chat


def account(store, indices=(0,)):
    return "\n".join(text_of(store, list(indices), colour=False, width=100))


def test_account(chatml_tokenizer):
    """Samples, findings on their rows only, accounting, dropped rows with reason and length, and the fingerprint are shown."""
    samples = [chat(chatml_tokenizer, ("user", "Hi"), ("assistant", answer)) for answer in ("one", "two")]
    findings = [
        Finding("empty_turn", "stop", "train.jsonl", row, "messages[0].content", f"what {row}", "fix it") for row in (1, 2)
    ]
    dropped = [
        {"file": "train.jsonl", "row": 3 + n, "reason": "longer_than_max_seq_len", "tokens": 9000 + n} for n in range(12)
    ]
    text = account(Store(samples, chatml_tokenizer, findings=findings, dropped=dropped))
    assert "⟦one⟪<|im_end|>⟫⟧" in text
    assert "two" not in text
    assert "stop empty_turn: train.jsonl:1 messages[0].content: what 1; fix it" in text
    assert "what 2" not in text
    assert "kept 2 of 14 rows; dropped 12 longer_than_max_seq_len" in text
    assert "train.jsonl:3 longer_than_max_seq_len, 9,000 tokens" in text
    assert "train.jsonl:13" not in text
    assert "and 2 more, in store/dropped.jsonl" in text
    assert f"fingerprint {FINGERPRINT}" in text
    assert "held out" not in text


def test_show_reads_the_arrays(chatml_tokenizer, small_chats, write_rows, tmp_path, capsys, monkeypatch):
    """The store's arrays are shown, decoded with its own tokenizer: nothing is tokenised again."""
    store = forge_data.prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", progress=False)
    ids = np.fromfile(tmp_path / "store" / "input_ids.bin", "<i4")
    last = store[11]
    monkeypatch.setattr(type(chatml_tokenizer), "__call__", None)
    forge_data.show(tmp_path / "store", 11)
    expected = capsys.readouterr().out
    assert "train.jsonl:12 · sample 11" in expected
    learned = chatml_tokenizer.decode(last.labels[last.labels != -100])
    assert f"⟦{learned}⟧".replace("<|im_end|>", "⟪<|im_end|>⟫").replace(" ", "·") in expected
    assert ids[-len(last) :].tolist() == last.input_ids.tolist()
    assert f"fingerprint {store.fingerprint}" in expected


def test_show_a_view_and_a_preference(chatml_tokenizer, write_rows, tmp_path, capsys):
    """Views and preferences are shown as well, even one side of a preference."""
    row = {"prompt": [{"role": "user", "content": "Hi"}]}
    row |= {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    store = forge_data.prepare(write_rows([row]), chatml_tokenizer, tmp_path / "store", progress=False)
    forge_data.show(store)
    expected = capsys.readouterr().out
    assert "learned" in expected
    assert "· chosen\n" in expected
    assert "· rejected\n" in expected
    forge_data.show(store.select([1]), 0)
    assert "⟦rejected" in capsys.readouterr().out


def test_show_refuses(tmp_path, chatml_tokenizer):
    """A missing store, and a sample that it does not have, are this package's errors."""
    with pytest.raises(forge_data.StoreError):
        forge_data.show(tmp_path)
    with pytest.raises(forge_data.DataError, match="no sample 3: the store has 0 to 0"):
        forge_data.show(Store([chat(chatml_tokenizer, ("user", "Hi"))], chatml_tokenizer), 3)


@pytest.mark.parametrize(
    ("environment", "terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour(environment, terminal, colour, monkeypatch):
    """Colour is for terminals that have it, and NO_COLOR turns it off."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    assert wants_colour(stream) is colour


def test_any_encoding():
    """A terminal with ASCII only gets escapes, not an error."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_line(stream, "⟦日⟧")
    stream.flush()
    assert raw.getvalue() == b"\\u27e6\\u65e5\\u27e7\n"


def test_words_from_files_are_harmless():
    """Quoted text in a finding cannot control the terminal, nor begin a line."""
    assert plain("a b\x1b[31m\nc") == "a b␛[31m↵c"
