"""The micro-batches by which memory is planned are those that may take the most of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge.memory import _largest
from forge.tasks.items._samples import Samples


@pytest.mark.parametrize("pads", [True, False])
def test_images_that_are_padded_to_the_largest(pads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where images are padded, many small ones beside a large one are tried, which have not the most tokens.

    So are many clips, of each of which a tower may be given 30 s.
    """
    train = Samples.__new__(Samples)
    train.media_counts = np.array([[1, 40], [1, 40], [1, 30], [1, 2], [1, 2], [1, 2]])
    rows = [[0, 1], [2, 3, 4, 5]]
    plan: Any = SimpleNamespace(
        endless=False,
        num_steps=1,
        world_size=1,
        lines=None,
        lengths=np.array([50, 50, 31, 3, 3, 3]),
        micro_batches=lambda *_: [np.array(each) for each in rows],
        places=lambda row: int(plan.lengths[row].sum()),
    )
    monkeypatch.setattr(_largest, "pads_media", lambda *_: pads)
    train.store = SimpleNamespace(media_kinds=("image",))
    planned: Any = SimpleNamespace(media=True, media_rows=None, settings=None, tokenizer=None, plan=plan, train=train)
    found = [row.tolist() for row, _ in _largest.largest_micro_batches(planned)]
    assert found == (rows if pads else rows[:1])
    train.store.media_kinds = ("image", "audio")
    assert [row.tolist() for row, _ in _largest.largest_micro_batches(planned)] == rows
