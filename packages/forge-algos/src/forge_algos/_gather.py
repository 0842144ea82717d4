"""Gathering of the data shards' numbers on every rank, through the sum of `Parallel`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_algos._parallel import Parallel


def share_of(number: int, shard: int, shards: int) -> slice:
    """Return a data shard's share of `number` things, in the order of the shards.
    Shares differ by one at most.
    """
    return slice(number * shard // shards, number * (shard + 1) // shards)


def gather(mine: Sequence[Any] | NDArray[Any], parallel: Parallel, shard: int) -> NDArray[np.float64]:
    """Concatenate the numbers of all data shards, in their order. Collective.

    A shard may have any number of them. Exact for integers below 2^53 and for float32; a NaN stays one.
    """
    values = np.asarray(mine, np.float64)
    sizes = np.zeros(parallel.data_parallel_size)
    sizes[shard] = len(values)
    sizes = np.array(parallel.sum(sizes.tolist())).astype(np.int64)
    begins = int(sizes[:shard].sum())
    return scatter(values, np.arange(begins, begins + len(values)), int(sizes.sum()), parallel)


def scatter(mine: NDArray[Any], places: NDArray[np.int64], number: int, parallel: Parallel) -> NDArray[np.float64]:
    """Put this shard's numbers at `places` of float64[number], beside the others'. Collective.
    Places of no shard are 0.
    """
    whole = np.zeros(number)
    whole[places] = mine
    return np.array(parallel.sum(whole.tolist())) if parallel.data_parallel_size > 1 else whole
