"""Rows of a data set that are chosen at random, and those of a number of its own."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from forge_data import DataError, check_first_row, lint, merge, prepare
from forge_data.reading._sources import resolve

from ..families import FAMILIES

N = 40


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One data set in forms that number rows otherwise, and in two files."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"prompt": f"say {n}", "completion": f"{n}"} for n in range(N)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "blank.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "a.csv").write_text("prompt,completion\n" + "".join(f'"{row["prompt"]}",{row["completion"]}\n' for row in rows))
    (folder / "two").mkdir()
    for name, part in (("1.jsonl", rows[:15]), ("2.jsonl", rows[15:])):
        (folder / "two" / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def read(path, **own):
    """Numbers in the rows that are read, in order."""
    return [int(record.fields["completion"]) for source in resolve({str(path): own}) for record in source.records()]


@settings(max_examples=40)
@given(number=st.integers(1, N), seed=st.integers(0, 2**40), more=st.integers(0, 5))
def test_the_same_rows_in_every_form(files, number, seed, more):
    """So many rows, in the file's order; the same of JSONL, JSON, CSV and a directory; a larger number has them all."""
    chosen = read(files / "a.jsonl", random_rows=number, random_seed=seed)
    assert len(chosen) == number
    assert chosen == sorted(set(chosen))
    for name in ("blank.jsonl", "a.json", "a.csv", "two"):
        assert read(files / name, random_rows=number, random_seed=seed) == chosen
    assert set(chosen) <= set(read(files / "a.jsonl", random_rows=min(N, number + more), random_seed=seed))
    assert read(files / "a.jsonl", random_rows=number / N, random_seed=seed) == chosen or number == N


def test_fixed_for_ever(files):
    """The rule is SplitMix64 of seed and place, so that these are the rows in every release."""
    assert read(files / "a.jsonl", random_rows=5) == FIRST_FIVE
    assert read(files / "a.jsonl", random_rows=5, random_seed=1) != FIRST_FIVE
    assert read(files / "a.jsonl", max_samples=3) == [0, 1, 2]
    given = {str(files / "a.jsonl"): {"random_rows": 5}, str(files / "two"): {"max_samples": 17}, str(files / "a.csv"): {}}
    found = [[int(each.fields["completion"]) for each in source.records()] for source in resolve(given, max_samples=2)]
    assert found == [FIRST_FIVE[:2], list(range(15)), [15, 16], [0, 1]]


FIRST_FIVE = [2, 4, 6, 32, 33]


def test_a_store_of_them(files, tmp_path):
    """Its parts make the same; broken rows that are not read stop nothing; the lint and the first-row check read no other."""
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    lines = (files / "a.jsonl").read_text().split("\n")
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(line if n in FIRST_FIVE else "{" for n, line in enumerate(lines)))
    data = {str(broken): {"random_rows": 5}}
    store = prepare(data, tokenizer, tmp_path / "store")
    assert [store.source(at) for at in range(len(store))] == [f"broken.jsonl:{n + 1}" for n in FIRST_FIVE]
    for part in (1, 2):
        prepare(data, tokenizer, tmp_path / str(part), shard=f"{part}/2")
    assert merge(tmp_path / "merged", [tmp_path / "1", tmp_path / "2"]).fingerprint == store.fingerprint
    check_first_row(data)
    assert not lint(data, tokenizer).stops
    changed = prepare({str(files / "a.jsonl"): {"random_rows": 5, "random_seed": 1}}, tokenizer, tmp_path / "other")
    assert changed.inputs != prepare({str(files / "a.jsonl"): {"random_rows": 5}}, tokenizer, tmp_path / "third").inputs


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"random_rows": N + 1}, "random_rows of .*a.jsonl is 41, and it has 40 rows: give a number of them"),
        ({"random_rows": 0.001}, "is 0.001, and it has 40 rows"),
        ({"random_rows": 1.5}, "random_rows of the entry .* it must be a share between 0 and 1, or a whole number"),
        ({"random_rows": True}, "random_rows of the entry .* is true; it must be a share"),
        ({"random_seed": 1}, "random_seed of the entry .* has no effect without random_rows"),
        ({"random_rows": 1, "random_seed": -1}, "random_seed of the entry .* is int -1"),
        ({"random_rows": 1, "max_samples": 2}, "has random_rows and max_samples, which both choose its rows"),
        ({"max_samples": 0}, "max_samples of the entry .* is int 0"),
        ({"num_samples": 3}, "here it is random_rows, or max_samples for the first ones"),
    ],
)
def test_refused(files, own, message):
    """By the entry."""
    with pytest.raises(DataError, match=message):
        resolve({str(Path(files / "a.jsonl")): own})
