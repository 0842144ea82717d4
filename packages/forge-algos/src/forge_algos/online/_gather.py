"""Each rank's numbers → all of them on every rank, through the one collective that this room knows: a sum."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_algos._parallel import Parallel


def share_of(number: int, rank: int, world_size: int) -> slice:
    """Which of `number` things are this rank's: as many as the others', or one more, in the order of the ranks."""
    return slice(number * rank // world_size, number * (rank + 1) // world_size)


def gather(mine: Sequence[Any] | NDArray[Any], parallel: Parallel, rank: int) -> NDArray[np.float64]:
    """Numbers of this rank (any number of them) → float64 of all, in the order of the ranks. Collective.

    Exact for integers below 2^53 and for float32; a NaN stays one.
    """
    values = np.asarray(mine, np.float64)
    sizes = np.zeros(parallel.world_size)
    sizes[rank] = len(values)
    sizes = np.array(parallel.sum(sizes.tolist())).astype(np.int64)
    begins = int(sizes[:rank].sum())
    return scatter(values, np.arange(begins, begins + len(values)), int(sizes.sum()), parallel)


def scatter(mine: NDArray[Any], places: NDArray[np.int64], number: int, parallel: Parallel) -> NDArray[np.float64]:
    """This rank's numbers at `places` of float64[number], and the other ranks' at theirs; 0 where nobody has any. Collective."""
    whole = np.zeros(number)
    whole[places] = mine
    return np.array(parallel.sum(whole.tolist())) if parallel.world_size > 1 else whole
