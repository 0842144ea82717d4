"""Images of a step's micro-batches are read ahead, in the order in which a step asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forge_algos
from forge.tasks.items import _media
from forge.tasks.items._media import MediaRow, read_ahead

if TYPE_CHECKING:
    from collections.abc import Callable


def row(number: int, reads: list[int]) -> Any:
    """A row whose images are its number."""

    def read() -> Any:
        reads.append(number)
        return [{"pixel_values": np.array([number])}]

    return MediaRow(packed=object(), media_inputs=read)


def answers(number: int, reads: list[int]) -> Any:
    """A micro-batch of answers and mismatches."""
    own, other = row(2 * number, reads), row(2 * number + 1, reads)
    return forge_algos.KTOBatch(completions=own, mismatched=other, desirable=np.ones(1, bool))


ORDERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    # The KL of all mismatches comes first, of model and reference.
    "kto": lambda made: [*(b.mismatched for b in made for _ in range(2)), *(b.completions for b in made for _ in range(2))],
    "of each micro-batch": lambda made: [row for batch in made for row in (batch.mismatched, batch.completions)],
    "backwards": lambda made: [row for batch in made[::-1] for row in (batch.completions, batch.mismatched)],
}


@pytest.mark.parametrize("order", ORDERS)
def test_answers_and_mismatches(order: str) -> None:
    """Each row has its own images in any order; in that of a step each is read once, though two models ask for it."""
    reads: list[int] = []
    given = [answers(number, reads) for number in range(3)]
    made = read_ahead(given)
    asked = ORDERS[order](made)
    expected = ORDERS[order](given)
    found = [int(each.media_inputs()[0]["pixel_values"][0]) for each in asked]
    assert (sorted(reads) == list(range(6))) or order != "kto"
    assert found == [int(each.media_inputs()[0]["pixel_values"][0]) for each in expected]


def test_texts_that_are_embedded_first() -> None:
    """A step's texts are all embedded and then all learned from: images are read ahead in both passes."""
    reads: list[int] = []
    given = [forge_algos.ContrastiveBatch(row=row(number, reads), queries=np.zeros(1, int), positives=np.ones(1, int))
             for number in range(3)]  # fmt: skip
    made = read_ahead(given)
    for _ in range(2):
        reads.clear()
        for number, batch in enumerate(made):
            assert int(batch.row.media_inputs()[0]["pixel_values"][0]) == number
            _media._next.submit(int).result()  # behind the row that is read meanwhile
            # The second pass reads its first row when it is asked for, and the next one meanwhile.
            assert reads[-1] == min(number + 1, 2)
    assert reads == [0, 1, 2]


def test_rows_without_images_stay() -> None:
    """What has no images is the micro-batch that was given."""
    batch = forge_algos.KTOBatch(completions=object(), mismatched=None, desirable=np.ones(1, bool))
    assert read_ahead([batch]) == [batch]
