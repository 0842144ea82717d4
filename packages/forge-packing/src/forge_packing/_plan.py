"""Lengths and a few numbers to a BatchPlan: first the order of the samples, then each step's division."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from forge_packing._batch_plan import BatchPlan
from forge_packing._checks import MAX_TOKENS, sample_lengths, sample_loss_counts, whole_number
from forge_packing._division import divide_step
from forge_packing._errors import PackingError
from forge_packing._order import run_order


def plan(
    lengths: npt.ArrayLike,
    *,
    batch_size: int,
    max_tokens: int,
    world_size: int = 1,
    seed: int = 0,
    epochs: int | None = 1,
    max_steps: int | None = None,
    loss_counts: npt.ArrayLike | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
) -> BatchPlan:
    """Which sample is trained on in which step, on which rank, in which micro-batch.

    lengths: N integers, the tokens of each sample, each from 1 to max_tokens.
    batch_size: samples in one step over all ranks, at least world_size.
    max_tokens: tokens in one micro-batch at most.
    seed: 0 to 2**32 - 1. A step's samples follow from (N, seed, epoch, batch_size) alone; world_size and max_tokens
        only divide them.
    epochs, max_steps: the run ends with whichever is reached first; epochs=None is endless and needs max_steps.
    loss_counts: N integers, the tokens of each sample that a loss is counted for (labels[1:] that are not -100).
    shuffle: False keeps the order of the data in every epoch.
    drop_last: leave out the short step at the end of an epoch.

    Raises PackingError, before anything is planned, for input that this cannot be done with.

    >>> p = plan([3, 5, 2, 7, 4], batch_size=2, max_tokens=8, shuffle=False)
    >>> [p.samples(step).tolist() for step in range(p.num_steps)]
    [[0, 1], [2, 3], [4]]
    >>> [micro_batch.tolist() for micro_batch in p.micro_batches(1)]
    [[3], [2]]
    """
    max_tokens = whole_number("max_tokens", max_tokens, 1, MAX_TOKENS)
    batch_size = whole_number("batch_size", batch_size, 1)
    world_size = whole_number("world_size", world_size, 1)
    seed = whole_number("seed", seed, 0, 2**32 - 1)
    epochs = None if epochs is None else whole_number("epochs", epochs, 1)
    max_steps = None if max_steps is None else whole_number("max_steps", max_steps, 1)
    if batch_size < world_size:
        raise PackingError(
            f"batch_size={batch_size} is less than world_size={world_size}: a step has no sample for some ranks. "
            f"Set batch_size to at least {world_size}, or use fewer ranks"
        )
    if epochs is None and max_steps is None:
        raise PackingError("epochs=None never ends: give max_steps, or a number of epochs")
    lengths_N = sample_lengths(lengths, max_tokens, "max_tokens")
    loss_counts_N = None if loss_counts is None else sample_loss_counts(loss_counts, lengths_N)
    if drop_last and lengths_N.size < batch_size:
        raise PackingError(
            f"drop_last leaves no step: {lengths_N.size} samples are fewer than batch_size={batch_size}. "
            "Lower batch_size, or set drop_last=False"
        )

    order, step_starts, step_epochs = run_order(
        lengths_N.size,
        batch_size=batch_size,
        seed=seed,
        epochs=epochs,
        max_steps=max_steps,
        shuffle=shuffle,
        drop_last=drop_last,
    )
    ordered_lengths: list[int] = lengths_N[order].tolist()
    positions: list[int] = []  # into `order`, micro-batch after micro-batch: step, then pass, then rank
    micro_batch_sizes: list[int] = []
    passes: list[int] = []
    starts: list[int] = step_starts.tolist()
    for start, stop in pairwise(starts):
        division = divide_step(ordered_lengths[start:stop], max_tokens, world_size)
        passes.append(len(division))
        for row in division:
            for micro_batch in row:
                micro_batch_sizes.append(len(micro_batch))
                positions += [start + position for position in micro_batch]

    return BatchPlan(
        lengths=lengths_N,
        loss_counts=loss_counts_N,
        batch_size=batch_size,
        max_tokens=max_tokens,
        world_size=world_size,
        seed=seed,
        epochs=epochs,
        max_steps=max_steps,
        shuffle=bool(shuffle),
        drop_last=bool(drop_last),
        order=order,
        step_starts=step_starts,
        step_epochs=step_epochs,
        members=order[np.array(positions, dtype=np.int64)],
        micro_batch_starts=np.concatenate([[0], np.cumsum(micro_batch_sizes, dtype=np.int64)]),
        pass_starts=np.concatenate([[0], np.cumsum(passes, dtype=np.int64)]),
    )
