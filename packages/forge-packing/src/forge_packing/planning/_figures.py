"""The steps of a plan to what their division comes to: micro-batches, fill and makespan, each beside its lower bound."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forge_packing._checks import Int64Array
from forge_packing.dividing._bounds import makespan_bound, micro_batch_bound
from forge_packing.planning._steps import Divided

if TYPE_CHECKING:
    from forge_packing.planning._batch_plan import BatchPlan

_FloatArray = npt.NDArray[np.float64]


class StepFigures(NamedTuple):
    """One step on R ranks. Costs are in the unit of the plan's `cost`: tokens, unless it says otherwise."""

    step: int
    samples: int
    tokens: int
    loss_tokens: int | None
    """None for a plan without loss_counts."""
    micro_batches: int
    """On each rank, empty ones included: K."""
    fewest_micro_batches: int
    """No division of these samples has fewer."""
    fill: float
    """Share of all micro-batches' budgets that holds a token."""
    makespan: float
    """Sum over the passes of the dearest micro-batch and the cost of a pass: what the step takes, as all wait for the slowest."""
    least_makespan: float
    """No division of these samples takes less."""
    imbalance: float
    """The makespan over what it were if every pass were spread evenly over its ranks."""


class BlockFigures(NamedTuple):
    """Consecutive steps, one entry a step."""

    samples: Int64Array
    tokens: Int64Array
    loss_tokens: Int64Array | None
    micro_batches: Int64Array
    fewest: Int64Array
    makespan: _FloatArray
    least: _FloatArray
    even: _FloatArray
    """The makespan if every pass were spread evenly over its ranks."""


def step_figures(plan: "BatchPlan", step: int) -> StepFigures:
    """What `BatchPlan.figures` returns."""
    block = plan._steps.divided(step // plan._steps.per_block)
    at = step - block.ordered.first
    found = block_figures(plan, block, at, at + 1)
    count = int(found.micro_batches[0])
    return StepFigures(
        step=step,
        samples=int(found.samples[0]),
        tokens=int(found.tokens[0]),
        loss_tokens=None if found.loss_tokens is None else int(found.loss_tokens[0]),
        micro_batches=count,
        fewest_micro_batches=int(found.fewest[0]),
        fill=int(found.tokens[0]) / (count * plan.world_size * plan.max_tokens),
        makespan=float(found.makespan[0]),
        least_makespan=float(found.least[0]),
        imbalance=float(found.makespan[0] / found.even[0]),
    )


def block_figures(plan: "BatchPlan", block: Divided, first: int, stop: int) -> BlockFigures:
    """The figures of a block's steps from first to stop, counted from the block's own first."""
    starts = block.ordered.step_starts[first : stop + 1]
    passes = block.pass_starts[first : stop + 1]
    micro_batches = block.micro_batch_starts[passes[0] * plan.world_size : passes[-1] * plan.world_size + 1]
    samples_P = block.ordered.samples[starts[0] : starts[-1]]
    lengths_P = plan.lengths[samples_P]
    members_P = block.members[starts[0] : starts[-1]] - starts[0]
    begins, first_passes = starts[:-1] - starts[0], passes[:-1] - passes[0]

    micro_batch_of = np.repeat(np.arange(micro_batches.size - 1), np.diff(micro_batches))
    costs = np.bincount(micro_batch_of, weights=plan.cost.of(lengths_P)[members_P], minlength=micro_batches.size - 1)
    by_rank = costs.reshape(-1, plan.world_size)
    overhead = np.diff(passes) * plan.cost.per_micro_batch
    steps = np.split(lengths_P, begins[1:])
    return BlockFigures(
        samples=np.diff(starts),
        tokens=np.add.reduceat(lengths_P, begins),
        loss_tokens=None if plan.loss_counts is None else np.add.reduceat(plan.loss_counts[samples_P], begins),
        micro_batches=np.diff(passes),
        fewest=np.array([micro_batch_bound(each, plan.max_tokens, plan.world_size) for each in steps], dtype=np.int64),
        makespan=np.add.reduceat(by_rank.max(axis=1), first_passes) + overhead,
        least=np.array([makespan_bound(each, plan.max_tokens, plan.world_size, plan.cost) for each in steps]),
        even=np.add.reduceat(by_rank.mean(axis=1), first_passes) + overhead,
    )


def together(parts: list[BlockFigures]) -> BlockFigures:
    """The figures of several blocks as one."""
    columns: dict[str, Any] = {name: [getattr(part, name) for part in parts] for name in BlockFigures._fields}
    joined: dict[str, Any] = {name: None if column[0] is None else np.concatenate(column) for name, column in columns.items()}
    return BlockFigures(**joined)
