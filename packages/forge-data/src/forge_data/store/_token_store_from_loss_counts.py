"""A store's loss mask to how many tokens of each sample count in the loss, a stretch at a time."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forge_data.store._files import Files

_STRETCH = 4096
"""Samples at once. All of them at once would take eight bytes a token, more than all else that preparing them takes."""


def loss_counts(files: "Files") -> "NDArray[np.int64]":
    """int64[N]: of each sample, the tokens but the first that are learned."""
    mask, offsets = files.arrays["loss_mask.bin"], files.arrays["offsets.bin"]
    counts = np.empty(len(offsets) - 1, dtype=np.int64)
    for first in range(0, len(counts), _STRETCH):
        bounds = offsets[first : first + _STRETCH + 1]
        here = mask[bounds[0] : bounds[-1]]
        starts = bounds[:-1] - bounds[0]
        counts[first : first + _STRETCH] = np.add.reduceat(here, starts, dtype=np.int64) - here[starts]
        files.release()
    return counts
