"""Findings about a whole data set: repetitions, overlap, outliers."""

from collections import Counter
from random import Random

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_data._example import IGNORED, TokenizedExample
from forge_data._media import Media
from forge_data.findings._rules import Where
from forge_data.linting._dataset import duplicates, extreme_lengths, outliers, overlap
from forge_data.linting._sample_table import TableBuilder
from forge_data.store._duplicates import digest


def example(ids, learned):
    """Make a sample of which the last `learned` tokens are learned."""
    ids = np.array(ids, dtype=np.int32)
    labels = np.where(np.arange(len(ids)) >= len(ids) - learned, ids, np.int32(IGNORED))
    return TokenizedExample(ids, labels)


def table(units, *, pair=False, file="train.jsonl"):
    """Make a table of units of samples, one a row."""
    builder = TableBuilder()
    for row, unit in enumerate(units, start=1):
        builder.add(Where(file, row, f"{file}:{row}"), unit, pair=pair)
    return builder.build()


def sequences():
    return st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=12)


@given(sequences())
def test_repetitions_are_all_found_and_nothing_else(rows):
    """Each row whose ids occurred before is reported with the first that has them, and no other; rows may be empty or begin
    alike.
    """
    found = [(each.row, each.what.rpartition(":")[2]) for each in duplicates(table([[example(row, 1)] for row in rows]))]
    firsts: dict[tuple, int] = {}
    expected = []
    for at, row in enumerate(map(tuple, rows), start=1):
        if row in firsts:
            expected.append((at, str(firsts[row])))
        firsts.setdefault(row, at)
    assert found == expected


@given(sequences(), sequences())
def test_overlap_is_found_and_nothing_else(trained, held_out):
    """Each held-out row that is trained on is a stop, by its own file and row."""
    train, evaluation = (
        table([[example(row, 1)] for row in rows], file=file)
        for rows, file in ((trained, "train.jsonl"), (held_out, "eval.jsonl"))
    )
    found = list(overlap(train, evaluation))
    assert [each.row for each in found] == [at for at, row in enumerate(held_out, start=1) if row in trained]
    assert all(each.severity == "stop" and each.file == "eval.jsonl" for each in found)


def test_a_preference_is_one_unit():
    """The same answer to two prompts, or chosen once and rejected once, is no repetition; the same pair is."""
    a, b, c = ([example([1, n], 1)] for n in (2, 3, 4))
    pairs = [a + b, b + a, a + c, a + b]
    assert [each.row for each in duplicates(table(pairs, pair=True))] == [4]
    assert digest([np.array([1, 2], np.int32), np.array([3], np.int32)]) != digest(
        [np.array([1], np.int32), np.array([2, 3], np.int32)]
    )


def test_pieces_of_one_row_are_no_repetition():
    """Equal pieces of one row that was split are no repetition."""
    assert not list(duplicates(table([[example([1, 2], 1), example([1, 2], 1)]])))


@pytest.mark.parametrize("seed", range(20))
def test_outliers(seed):
    """Among rows that are learned by a third to two thirds, one that is hardly or wholly learned is reported."""
    rng = Random(seed)
    units = []
    for _ in range(rng.randint(30, 200)):
        size = rng.randint(20, 400)
        units.append([example(range(size), max(1, round(size * rng.uniform(0.33, 0.67))))])
    at = rng.randrange(len(units))
    size = rng.randint(3000, 9000)
    units[at] = [example(range(size), rng.choice([rng.randint(1, 9), size]))]
    found = list(outliers(table(units)))
    assert [each.row for each in found] == [at + 1]
    assert found[0].severity == "warn"


def test_tokens_of_images_are_no_text():
    """A row with a large picture is as much learned as its text is."""
    units = [[example(range(size), size // 2)] for size in range(50, 90)]
    pictured = attrs.evolve(example(range(5000), 30), media=(Media("images[0]", "/a.png", None, "", 10, 4950),))
    assert not list(outliers(table([*units, [pictured]])))
    assert [each.row for each in outliers(table([*units, [attrs.evolve(pictured, media=())]]))] == [41]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 1.0])
def test_no_outliers_where_rows_are_alike(share):
    """Rows of many lengths that are learned to about the same part, or wholly, are no outliers."""
    rng = Random(1)
    sizes = [int(10 ** rng.uniform(1.7, 4)) for _ in range(300)]
    units = [[example(range(size), max(1, round(size * min(1.0, share * rng.uniform(0.7, 1.3)))))] for size in sizes]
    assert not list(outliers(table(units)))


@pytest.mark.parametrize("pair", [False, True])
def test_an_extreme_length_is_named(pair):
    """One row of many times the tokens of all others is a warning, once, with both lengths; a shorter or a learned is none."""

    def lengths_of(longest, learned=0.5):
        sizes = [20, 60, longest, 41]
        return table([[example(range(size), int(size * learned))] * (1 + pair) for size in sizes], pair=pair)

    (finding,) = extreme_lengths(lengths_of(9000))
    assert (finding.row, finding.severity) == (3, "warn")
    assert finding.what.startswith("9,000 tokens, and all others have 60 or fewer")
    assert not list(extreme_lengths(lengths_of(8000)))
    assert not list(extreme_lengths(lengths_of(9000, learned=1)))
    assert not list(extreme_lengths(table([[example(range(9000), 3)], [example(range(901), 3)]])))


def test_few_samples_say_nothing():
    """A handful of samples has no usual share, and an empty table has neither repetitions nor outliers."""
    units = [[example(range(100), 50)]] * 5 + [[example(range(5000), 1)]]
    assert not list(outliers(table(units)))
    for rule in (outliers, duplicates, extreme_lengths):
        assert not list(rule(table([])))
    assert not list(overlap(table([]), table([])))


def test_places_of_a_table():
    """A sample is named as in every message, whatever file it is from."""
    builder = TableBuilder()
    wheres = [Where("a.jsonl", 3, "a.jsonl:3"), Where("b.json", 0, "b.json[0]"), Where("a.jsonl", 9, "a.jsonl:9")]
    for where in wheres:
        builder.add(where, [example([1, 2], 1)], pair=False)
    made = builder.build()
    assert [made.where(at) for at in range(3)] == wheres
    assert [Where.of(where.place) for where in wheres] == wheres
    assert Counter(made.lengths.tolist()) == {2: 3}
    assert made.loss_counts.tolist() == [1, 1, 1]
