"""Rows of earlier tasks on which OSFT measures."""

from __future__ import annotations

from typing import Any

import numpy as np

from forge.run._adaptation import _few_batches


class Rows:
    """Samples of given lengths, whose batches are their numbers."""

    media_rows = "packed"

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)

    def batch(self, indices: list[int]) -> list[int]:
        return list(indices)


def batches(lengths: list[int], **how: Any) -> Any:
    """Return the batches of samples of these lengths."""
    rows: Any = Rows(lengths)
    return _few_batches(rows, 8192, **how)


def chosen(lengths: list[int], **how: Any) -> list[int]:
    """Return the numbers of the samples that are measured on."""
    return [number for batch in batches(lengths, **how) for number in batch]


def test_a_task_at_the_end_is_measured_too() -> None:
    """Rows are spread over the whole file, though the first task's are much longer than the second's."""
    found = chosen([6000] * 100 + [50] * 100, spread=True)
    assert min(found) < 100 <= max(found)
    short_first = chosen([50] * 100 + [6000] * 100, spread=True)
    assert min(short_first) < 100 <= max(short_first)
    assert len(chosen([60] * 10_000, spread=True)) == 16_384 // 60


def test_the_first_rows_without_spreading() -> None:
    """The first rows with enough tokens, in batches of no more than was asked for."""
    assert chosen([1000] * 50) == list(range(17))
    assert all(len(batch) <= 8 for batch in batches([1000] * 50))


def test_rows_with_images_are_alone() -> None:
    """Rows with images are measured on one by one, as every model takes them."""
    rows: Any = Rows([1000] * 50)
    rows.media_rows = "single"
    assert [len(batch) for batch in _few_batches(rows, 8192)] == [1] * 17
