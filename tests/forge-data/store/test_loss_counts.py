"""Loss counts and prompts, some samples at a time."""

import itertools

import numpy as np
import pytest

from forge_data.store import _token_store
from forge_data.store._token_store import loss_counts, prompt_lengths


class Files:
    """Arrays of a store of random lengths and masks."""

    def __init__(self, samples):
        draw = np.random.default_rng(samples)
        self.arrays = {"offsets.bin": np.concatenate([[0], np.cumsum(draw.integers(1, 9, samples))]).astype(np.int64)}
        self.arrays["loss_mask.bin"] = draw.integers(0, 2, self.arrays["offsets.bin"][-1]).astype(np.uint8)
        self.released = 0

    def release(self):
        self.released += 1


@pytest.mark.parametrize("samples", [1, 2, 6, 7, 8, 14, 15, 300])
def test_any_stretch(monkeypatch, samples):
    """For any number of samples counts and prompts are those of each sample alone, and memory is given back each time."""
    monkeypatch.setattr(_token_store, "_COUNTED_AT_ONCE", 7)
    files = Files(samples)
    offsets, mask = files.arrays["offsets.bin"], files.arrays["loss_mask.bin"]
    expected = [int(mask[a + 1 : b].sum()) for a, b in itertools.pairwise(offsets)]
    assert loss_counts(files).tolist() == expected
    assert files.released == -(-samples // 7)
    prompts = [int(np.argmax(np.append(mask[a:b], 1))) for a, b in itertools.pairwise(offsets)]
    assert prompt_lengths(files).tolist() == prompts
    assert files.released == 2 * -(-samples // 7)
