"""TRL's `pack_dataset` beside `pack_rows`: at most as many rows, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest

import forge_packing

from ..lanes import ci_keeps
from .packing_lengths import lengths as families

trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")


LONG = {"long context", "long reasoning"}
"""Of these TRL takes seconds."""


@pytest.mark.parametrize("family", ci_keeps([name for name in families.FAMILIES if name not in LONG], families.FAMILIES))
def test_no_more_rows_than_trl(family):
    """2,000 samples of each family: every one in a row, no row over the budget, no more rows than TRL's best-fit decreasing."""
    from datasets import Dataset

    steps = list(families.trials(family, 32))
    lengths = np.concatenate([step.lengths for step in steps])[:2000]
    capacity = steps[0].max_tokens
    data = Dataset.from_dict({"input_ids": [[0] * length for length in lengths.tolist()]})
    theirs = len(trl.pack_dataset(data, capacity, strategy="bfd"))
    rows = forge_packing.pack_rows(lengths, capacity)
    assert len(rows) <= theirs
    assert sorted(np.concatenate(rows).tolist()) == list(range(lengths.size))
    assert max(lengths[row].sum() for row in rows) <= capacity
