"""Ranks that are threads of one process, one running at a time.

A `Parallel` that adds up gradients itself, and logs its calls. Several ranks may share a data shard, as where a model's
tensors are divided too: they get the same batches, and their sums count once.
"""

import contextlib
import threading

import torch

from forge_algos._parallel import Alone


class Rank(Alone):
    """One of R threads; it runs while it holds the turn.
    It passes the turn on where it waits for the others.
    """

    def __init__(self, shared, rank):
        self.shared, self.rank = shared, rank
        self.world_size = shared.world_size
        self.data_parallel_size = shared.world_size // shared.ranks_a_shard
        self.data_parallel_rank = rank // shared.ranks_a_shard
        self.calls = []
        self.gradients = None

    def meet(self, value):
        """Return every rank's value, in the order of ranks."""
        self.shared.slots[self.rank] = value
        found = []
        for wait in range(2):
            self.shared.turn.release()
            try:
                self.shared.barrier.wait(timeout=60)
            finally:
                self.shared.turn.acquire()
            if wait == 0:
                found = list(self.shared.slots)
        return found

    def sum(self, values):
        self.calls.append(("sum", len(values)))
        met = self.meet(list(values))
        # What gloo or NCCL do with different lengths is not defined.
        assert len({len(each) for each in met}) == 1
        return [float(torch.tensor(column, dtype=torch.float64).sum()) for column in zip(*self.one_a_shard(met), strict=True)]

    def gather(self, rows):
        self.calls.append(("gather", len(rows)))
        met = self.meet(rows.detach())
        # What gloo or NCCL do with different shapes or types is not defined.
        assert len({(each.dtype, each.shape[1:]) for each in met}) == 1
        shards = self.one_a_shard(met)
        return torch.cat(shards), sum(map(len, shards[: self.data_parallel_rank]))

    def any(self, flag):
        self.calls.append(("any",))
        return any(self.meet(bool(flag)))

    def one_a_shard(self, met):
        """Return the value of the first rank of each data shard.
        The shard's other ranks must have given the same.
        """
        each = self.shared.ranks_a_shard
        for at, value in enumerate(met):
            torch.testing.assert_close(value, met[at // each * each], rtol=0, atol=0, equal_nan=True)
        return met[::each]

    @contextlib.contextmanager
    def micro_batch(self, last):
        self.calls.append(("micro_batch", last))
        yield
        if last:
            parameters = [p for p in self.parameters if p.requires_grad]
            # As DDP and FSDP do: a parameter that took no part in the backward pass would be waited for by the others.
            assert all(p.grad is not None for p in parameters)
            met = self.meet([p.grad.clone() for p in parameters])
            for parameter, grads in zip(parameters, zip(*self.one_a_shard(met), strict=True), strict=True):
                parameter.grad = torch.stack(grads).sum(0)

    def backward(self, loss):
        self.calls.append(("backward",))
        super().backward(loss)

    def grad_norm(self, parameters):
        self.calls.append(("grad_norm",))
        return super().grad_norm(parameters)

    def step(self, optimizer):
        self.calls.append(("step",))
        super().step(optimizer)


class Shared:
    def __init__(self, world_size, ranks_a_shard):
        self.world_size, self.ranks_a_shard = world_size, ranks_a_shard
        self.slots = [None] * world_size
        self.barrier = threading.Barrier(world_size)
        self.turn = threading.Lock()


def on_threads(function, world_size, ranks_a_shard=1):
    """Return [function(rank) for each rank], run at once.
    The first error by rank is raised, without those that only waited for it.
    """
    shared = Shared(world_size, ranks_a_shard)
    results, errors = [None] * world_size, [None] * world_size

    def run(rank):
        with shared.turn:
            try:
                results[rank.rank] = function(rank)
            except BaseException as error:
                errors[rank.rank] = error
                shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(Rank(shared, rank),)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)]
    for error in own or filter(None, errors):
        raise error
    return results
