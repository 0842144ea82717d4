"""Margins: a float32 for each pair, in every row or in none."""

import json
from decimal import Decimal

import numpy as np
import pytest

from forge_data import DataError, StoreError, TokenStore, lint, prepare
from forge_data.formats._weights import margin_of
from forge_data.preparing import _pipeline


def rows(margins):
    """Pairs that differ by a number; None is a row without a margin."""
    made = [{"prompt": f"count to {n}", "chosen": f"{n}!", "rejected": f"{n}?"} for n in range(len(margins))]
    return [row if margin is None else row | {"margin": margin} for row, margin in zip(made, margins, strict=True)]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (None, None),
        ("", None),
        (0, 0.0),
        (-2, -2.0),
        (0.25, 0.25),
        ("1e-3", 1e-3),
        (" 2 ", 2.0),
        (Decimal("0.5"), 0.5),
        (3e38, 3e38),
    ],
)
def test_read(value, read):
    """Any finite number is read, also as text (all that a CSV file has); an empty cell is no margin."""
    assert margin_of("f:1", value) == read


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "-inf", "nan", "much", True, [1], {"a": 1}, 1e39, 10**400])
def test_refused(value):
    """A value that is not a finite float32 is refused by row."""
    with pytest.raises(DataError, match="f:1: field margin is .*; it must be a finite number that fits into float32"):
        margin_of("f:1", value)


def test_of_a_store(write_rows, chatml_tokenizer, tmp_path):
    """There is one a pair, in the order of `pairs`, exact to float32, through views of views; part of the fingerprint."""
    given = [0.1, -3.5, 0, 1e-8, 7, 2.5]
    store = prepare(write_rows(rows(given)), chatml_tokenizer, tmp_path / "store")
    assert store.margins.dtype == np.float32
    assert store.margins.tolist() == np.array(given, dtype=np.float32).tolist()
    view = store.select([9, 8, 2, 3, 11, 10]).select([4, 5, 0, 1])
    assert [store.source(int(i)) for i in (10, 8)] == [view.source(int(i)) for i in view.pairs[:, 0]]
    assert view.margins.tolist() == [2.5, 7.0]
    train, held_out = store.split(0.4, seed=1)
    seen = {
        view.source(int(at)): float(margin)
        for view in (train, held_out)
        for at, margin in zip(view.pairs[:, 0], view.margins, strict=True)
    }
    assert seen == {f"train.jsonl:{n + 1}": float(np.float32(margin)) for n, margin in enumerate(given)}
    with pytest.raises(StoreError, match="one side of a preference"):
        _ = store.select([0]).margins
    again = TokenStore.open(tmp_path / "store")
    again.verify()
    assert again.margins.tolist() == store.margins.tolist()
    other = prepare(write_rows(rows([*given[:-1], 2.25]), "other.jsonl"), chatml_tokenizer, tmp_path / "other")
    assert other[0].input_ids.tolist() == store[0].input_ids.tolist()
    assert other.fingerprint != store.fingerprint


def test_of_none(write_rows, chatml_tokenizer, small_chats, tmp_path):
    """Where no row has one there are none, and no file of them."""
    store = prepare(write_rows(rows([None, None])), chatml_tokenizer, tmp_path / "store")
    assert store.margins is None
    assert store.select([0, 1]).margins is None
    assert not (tmp_path / "store" / "margins.bin").exists()
    assert prepare(write_rows(small_chats, "chats.jsonl"), chatml_tokenizer, tmp_path / "chats").margins is None


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize(
    ("margins", "expected"),
    [
        ([1, 2, None, 3], "train.jsonl:3 has no margin, but train.jsonl:1 has one; give every row a margin, or no row one"),
        ([None, None, 0, None], "train.jsonl:3 has a margin, but train.jsonl:1 has none"),
    ],
)
def test_of_some(margins, expected, chunk, write_rows, chatml_tokenizer, tmp_path, monkeypatch):
    """The first row that differs from the first of all is refused, for any chunk size; 0 is a margin."""
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", chunk)
    with pytest.raises(DataError, match=expected):
        prepare(write_rows(rows(margins)), chatml_tokenizer, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_the_lint_sees_it_too(write_rows, chatml_tokenizer):
    """Each row whose margin is missing, or the only one, is a finding that stops."""
    found = lint(write_rows(rows([1, None, 2, "much", None])), chatml_tokenizer).findings
    assert [(each.row, each.rule, each.severity) for each in found] == [(row, "unreadable_row", "stop") for row in (2, 4, 5)]
    assert found[1].field == "margin"


def test_the_first_fault_is_told(write_rows, chatml_tokenizer, tmp_path):
    """Of a row without a margin and a broken one after it, the first is named."""
    broken = write_rows([*rows([1, None]), {"prompt": "a", "chosen": 3, "rejected": 4}])
    with pytest.raises(DataError, match="train.jsonl:2 has no margin"):
        prepare(broken, chatml_tokenizer, tmp_path / "store")


def test_of_rows_that_are_left_out(write_rows, chatml_tokenizer, tmp_path):
    """A margin stays with its row, whatever rows before it were left out; those need none."""
    bad = {"prompt": "a", "chosen": "b", "rejected": "b"}
    long = {"prompt": "a", "chosen": "b " * 300, "rejected": "c", "margin": 9}
    store = prepare(
        write_rows([bad, *rows([1]), long, bad, *rows([2, 3])]),
        chatml_tokenizer,
        tmp_path / "store",
        on_bad_pair="skip",
        max_seq_len=99,
    )
    assert store.margins.tolist() == [1, 2, 3]
    assert [store.source(int(at)) for at in store.pairs[:, 0]] == ["train.jsonl:2", "train.jsonl:5", "train.jsonl:6"]


@pytest.mark.slow
def test_any_number_of_workers(write_rows, chatml_tokenizer, tmp_path, monkeypatch):
    """Workers write the same margins as this process alone."""
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", 200)
    path = write_rows(rows([n / 7 for n in range(40)]))
    alone, two = (prepare(path, chatml_tokenizer, tmp_path / f"store-{n}", num_proc=n) for n in (1, 2))
    assert (alone.path / "margins.bin").read_bytes() == (two.path / "margins.bin").read_bytes()
    assert alone.fingerprint == two.fingerprint


def test_a_store_of_the_version_before(write_rows, chatml_tokenizer, tmp_path):
    """A store without margins of an older forge-data is read as before, and made anew when it is prepared."""
    path = write_rows(rows([None, None]))
    store = prepare(path, chatml_tokenizer, tmp_path / "store")
    manifest = tmp_path / "store" / "store.json"
    message = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(message | {"version": 2, "inputs": "0" * 64}))
    assert TokenStore.open(tmp_path / "store").fingerprint == store.fingerprint
    assert prepare(path, chatml_tokenizer, tmp_path / "store").inputs == store.inputs
    assert json.loads(manifest.read_text())["version"] == 4
