"""Figures of steps: micro-batches, fill and makespan, each beside its lower bound."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forge_packing._checks import Int64Array
from forge_packing.dividing._bounds import makespan_bound, micro_batch_bound, shared_bounds
from forge_packing.dividing._prefixes import Prefixes
from forge_packing.planning._steps import Divided, Steps

_FloatArray = npt.NDArray[np.float64]


class StepFigures(NamedTuple):
    """Figures of one step on R ranks; costs in the unit of the plan's `cost`, by default tokens."""

    step: int
    """The step, from 0."""
    samples: int
    """Samples over all ranks."""
    tokens: int
    """Tokens over all ranks."""
    loss_tokens: int | None
    """Tokens over all ranks that a loss is counted for; None for a plan without loss_counts."""
    micro_batches: int
    """K: micro-batches of each rank, empty ones included."""
    fewest_micro_batches: int
    """Lower bound of K: no division of these samples has fewer."""
    fill: float
    """Share of the token budget of all micro-batches, empty ones included, that holds a token; what is shared once."""
    makespan: float
    """Sum over the passes of the costliest micro-batch's cost and the cost of a pass: all ranks wait for the slowest."""
    least_makespan: float
    """Lower bound of the makespan: no division of these samples takes less."""
    imbalance: float
    """The makespan over its value if every pass were spread evenly over its ranks."""


class BlockFigures(NamedTuple):
    """Figures of consecutive steps, one array entry a step, named as in StepFigures."""

    samples: Int64Array
    tokens: Int64Array
    filled: Int64Array
    """Tokens that take room, a shared prefix once a micro-batch."""
    loss_tokens: Int64Array | None
    micro_batches: Int64Array
    fewest: Int64Array
    makespan: _FloatArray
    least: _FloatArray
    even: _FloatArray
    """The makespan if every pass were spread evenly over its ranks."""


def step_figures(steps: Steps, loss_counts: Int64Array | None, step: int) -> StepFigures:
    """Return the figures of one step."""
    block = steps.divided(step // steps.per_block)
    at = step - block.ordered.first
    found = block_figures(steps, loss_counts, block, at, at + 1)
    count = int(found.micro_batches[0])
    return StepFigures(
        step=step,
        samples=int(found.samples[0]),
        tokens=int(found.tokens[0]),
        loss_tokens=None if found.loss_tokens is None else int(found.loss_tokens[0]),
        micro_batches=count,
        fewest_micro_batches=int(found.fewest[0]),
        fill=int(found.filled[0]) / (count * steps.world_size * steps.max_tokens),
        makespan=float(found.makespan[0]),
        least_makespan=float(found.least[0]),
        imbalance=float(found.makespan[0] / found.even[0]),
    )


def block_figures(steps: Steps, loss_counts: Int64Array | None, block: Divided, first: int, stop: int) -> BlockFigures:
    """Return the figures of steps first to stop of a block, counted from the block's start."""
    ranks, capacity, cost = steps.world_size, steps.max_tokens, steps.cost
    starts = block.ordered.step_starts[first : stop + 1]
    passes = block.pass_starts[first : stop + 1]
    micro_batches = block.micro_batch_starts[passes[0] * ranks : passes[-1] * ranks + 1]
    samples_P = block.ordered.samples[starts[0] : starts[-1]]
    room_P = steps.room[samples_P]
    members_P = block.members[starts[0] : starts[-1]] - starts[0]
    begins, first_passes = starts[:-1] - starts[0], passes[:-1] - passes[0]

    micro_batch_of = np.repeat(np.arange(micro_batches.size - 1), np.diff(micro_batches))
    by_rank = micro_batch_costs(steps, samples_P[members_P], micro_batch_of, micro_batches.size - 1).reshape(-1, ranks)
    tokens, filled = (np.add.reduceat(each, begins) for each in (steps.lengths[samples_P], room_P))
    overhead = np.diff(passes) * cost.per_micro_batch
    by_step = np.split(room_P, begins[1:])
    if steps.prefixes is None:
        bounds = [(micro_batch_bound(each, capacity, ranks), makespan_bound(each, capacity, ranks, cost)) for each in by_step]
    else:
        prefixes = steps.prefixes.pick(samples_P)
        sizes = prefixes.pick(members_P).sizes(room_P[members_P], micro_batch_of, micro_batches.size - 1)
        filled = np.add.reduceat(sizes.reshape(-1, ranks).sum(axis=1), first_passes)
        each_of = np.split(prefixes.of, begins[1:])
        bounds = [
            shared_bounds(each, Prefixes(of, prefixes.tokens), capacity, ranks, cost)
            for each, of in zip(by_step, each_of, strict=True)
        ]
    return BlockFigures(
        samples=np.diff(starts),
        tokens=tokens,
        filled=filled,
        loss_tokens=None if loss_counts is None else np.add.reduceat(loss_counts[samples_P], begins),
        micro_batches=np.diff(passes),
        fewest=np.array([fewest for fewest, _ in bounds], dtype=np.int64),
        makespan=np.add.reduceat(by_rank.max(axis=1), first_passes) + overhead,
        least=np.array([least for _, least in bounds]),
        even=np.add.reduceat(by_rank.mean(axis=1), first_passes) + overhead,
    )


def micro_batch_costs(steps: Steps, samples: Int64Array, micro_batch_of: Int64Array, number: int) -> _FloatArray:
    """Return the cost of each micro-batch, of a shared prefix once: float64[number]."""
    room = steps.room[samples]
    if steps.prefixes is None:
        return np.bincount(micro_batch_of, weights=steps.cost.of(room), minlength=number).astype(np.float64)
    return steps.prefixes.pick(samples).costs(steps.cost, room, micro_batch_of, number)


def concatenate(parts: list[BlockFigures]) -> BlockFigures:
    """Concatenate the figures of several blocks."""
    columns: dict[str, Any] = {name: [getattr(part, name) for part in parts] for name in BlockFigures._fields}
    joined: dict[str, Any] = {name: None if column[0] is None else np.concatenate(column) for name, column in columns.items()}
    return BlockFigures(**joined)
