"""Planning: lengths and the settings of a run → BatchPlan."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from forge_packing.dividing._cost import Cost
from forge_packing.planning._batch_plan import BatchPlan
from forge_packing.planning._inputs import checked

_DEFAULT_COST = Cost()


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
    sources: npt.ArrayLike | None = None,
    weights: Sequence[float] | npt.NDArray[Any] | None = None,
    cost: Cost = _DEFAULT_COST,
    widths: npt.ArrayLike | None = None,
    lines: npt.ArrayLike | None = None,
    prefixes: npt.ArrayLike | None = None,
    prefix_tokens: npt.ArrayLike | None = None,
    repeated: npt.ArrayLike | None = None,
) -> BatchPlan:
    """Plan which sample is trained on in which step, on which rank and in which micro-batch.

    It takes the time of the checks: steps are computed when they are asked for.

    Args:
        lengths: N integers, the tokens of each sample, each from 1 to max_tokens.
        batch_size: Samples in one step over all ranks, at least world_size.
        max_tokens: Tokens in one micro-batch at most.
        world_size: R, the ranks that a step is divided over.
        seed: 0 to 2**32 - 1. A step's samples depend only on (N, seed, epoch, batch_size), and on the sources where they are
            weighted; world_size, max_tokens and cost only divide them.
        epochs: Epochs after which the run ends. With None and no max_steps the plan is endless: it is read by step or by
            position, and has no `num_steps`.
        max_steps: Steps after which the run ends; of the two limits, the one that is reached first.
        loss_counts: N integers, the tokens of each sample that a loss is counted for (labels[1:] that are not -100).
        shuffle: False keeps the order of the data in every epoch.
        drop_last: Leave out the short step at the end of an epoch.
        sources: N integers from 0 to M-1, the source of each sample; by default all 0.
        weights: M numbers above 0, the sources' shares of the samples drawn. Over any W samples in a row a source has its
            share of them to within 2. An epoch is then N draws; each source is passed over in its own order, shuffled anew on
            each pass. Shares that are no coarser fractions are rounded to millionths, to one at least. Without weights, every
            sample comes once an epoch.
        cost: What is balanced between ranks.
        widths: N integers, for a model whose micro-batches are padded: the places of each line of a sample. A micro-batch then
            has at most max_tokens places, its lines times the widest of them.
        lines: N integers, the lines of each sample where widths are given; by default one each.
        prefixes: N integers, the number of the prefix that each sample begins with, -1 for none, where what the samples of a
            micro-batch begin with is computed once (`collate_shared`). A micro-batch then has at most max_tokens with each
            prefix counted once, and at most eight times as many with repetitions, whose keys are gathered.
        prefix_tokens: G integers, the tokens of each prefix, as `find_prefixes` returns both.
        repeated: N integers, the tokens of each sample that are in it a second time and take room once, as the prompt of two
            answers does where it is computed for both (`collate_groups`); by default 0.

    Raises:
        PackingError: no plan can be made from these arguments; nothing has been planned.


    >>> p = plan([3, 5, 2, 7, 4], batch_size=2, max_tokens=8, shuffle=False)
    >>> [p.samples(step).tolist() for step in range(p.num_steps)]
    [[0, 1], [2, 3], [4]]
    >>> sorted(micro_batch.tolist() for micro_batch in p.micro_batches(1))
    [[2], [3]]
    >>> mixed = plan([1] * 6, batch_size=4, max_tokens=4, shuffle=False, sources=[0, 0, 0, 0, 1, 1], weights=[0.75, 0.25])
    >>> [mixed.samples(step).tolist() for step in range(mixed.num_steps)]
    [[0, 1, 4, 2], [3, 0]]
    """
    return BatchPlan(
        **checked(
            {
                "lengths": lengths,
                "batch_size": batch_size,
                "max_tokens": max_tokens,
                "world_size": world_size,
                "seed": seed,
                "epochs": epochs,
                "max_steps": max_steps,
                "loss_counts": loss_counts,
                "shuffle": shuffle,
                "drop_last": drop_last,
                "sources": sources,
                "weights": weights,
                "cost": cost,
                "widths": widths,
                "lines": lines,
                "prefixes": prefixes,
                "prefix_tokens": prefix_tokens,
                "repeated": repeated,
            }
        )
    )
