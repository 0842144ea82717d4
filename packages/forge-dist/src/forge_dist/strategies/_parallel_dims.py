"""Arrangement of the ranks: which have data of their own, which share a data shard.

Dimensions as torchtitan's ParallelDims names them, outermost first; consecutive ranks share a data shard.
"""

import attrs


@attrs.frozen(kw_only=True)
class ParallelDims:
    """R ranks as `dp_replicate` × `dp_shard` × `non_data`.

    A step's data are divided into `data_parallel_size` data shards. The `non_data` ranks of a data shard read the same
    micro-batches and compute the same numbers, each with a part of the model or of the work: tensor, context or expert
    parallelism. Their numbers count once in a sum over data.

    >>> dims = ParallelDims(dp_replicate=2, non_data=2)
    >>> dims.world_size, dims.data_parallel_size, [dims.data_parallel_rank(rank) for rank in range(4)]
    (4, 2, [0, 0, 1, 1])
    >>> [dims.counts(rank) for rank in range(4)]
    [True, False, True, False]
    """

    dp_replicate: int = 1
    """Number of copies of the model, each with data shards of its own."""

    dp_shard: int = 1
    """Number of ranks that divide a copy's weights or optimizer state among them, each with a data shard of its own."""

    non_data: int = 1
    """Number of ranks that share a data shard; torchtitan's cp · tp · pp."""

    @property
    def world_size(self) -> int:
        """R, the number of ranks."""
        return self.data_parallel_size * self.non_data

    @property
    def data_parallel_size(self) -> int:
        """Number of data shards."""
        return self.dp_replicate * self.dp_shard

    def data_parallel_rank(self, rank: int) -> int:
        """Return the data shard of a rank, from 0."""
        return rank // self.non_data

    def counts(self, rank: int) -> bool:
        """Return whether a rank's numbers count in a sum over data.

        Those of the first rank of each data shard do.
        """
        return rank % self.non_data == 0
