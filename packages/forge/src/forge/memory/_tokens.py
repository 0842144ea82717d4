"""Run that leaves max_tokens_per_gpu open → the largest micro-batch that fits its devices."""

from __future__ import annotations

import attrs

import forge_algos
import forge_dist
import forge_packing
from forge._progress import Reporter
from forge.memory._changes import forecast, with_changes
from forge.memory._forecast import ROLLOUT
from forge.memory._memory_plan import MemoryPlan, room as room_of, size
from forge.memory._planned import Planned
from forge.memory._plans import PLANNING, Plans, Search
from forge.memory._target import Target
from forge.tasks._rollouts import LOOKED_AT
from forge.tasks.items._items import places

_FILLED = 0.9
"""Part of a device's memory that a micro-batch of our choice may fill."""
_GRAIN = 256
"""Sizes of micro-batches that are tried are multiples of this."""
_FIRST = 2048
"""Tokens that are tried first: so many are computed in a second or a few."""
_ITEMS = 128
"""Items of average length that a micro-batch of our choice may hold: computing the plan takes as long as they are many."""
KINDS = ("none", "selective", "full")
"""Values of activation_checkpointing, the one that computes least first."""


def choose_tokens(planned: Planned, target: Target, report: Reporter) -> tuple[int | None, str, MemoryPlan]:
    """Find the largest micro-batch that fits: max_tokens_per_gpu where a run leaves it open.

    It holds no more than a rank's share of a step does, than keeps the device busy, or than is planned in seconds.

    Args:
        planned: the run, with the tokens that it takes where no plan can be made.
        target: devices that it is to fit.
        report: gets what is being tried.

    Returns:
        Tokens, None where the plan cannot say; the reason; and the memory plan with them.

    """
    default, least = planned.settings.plan.max_tokens_per_gpu, int(places(planned.settings, planned.train).max())
    if planned.held_out is not None:
        least = max(least, int(places(planned.settings, planned.held_out).max()))
    sharing = planned.settings.strategy.cp_size
    least = -(-least // sharing)
    if target.limit is None:
        return None, f"the memory of {target.name} is not known", forecast(planned, target, report)
    room = int(_FILLED * target.limit)
    try:
        plans = Plans(target)

        def cut(tokens: int) -> Planned:
            settings = planned.settings.with_value("plan", "max_tokens_per_gpu", tokens)
            return attrs.evolve(planned, settings=settings, plan=planned.plan.reshape(max_tokens=tokens * sharing))

        # A prompt becomes several completions.
        each = getattr(planned.settings.objective, "num_generations", 1)
        share, mean = -(-each * _share_of_step(planned.plan) // sharing), planned.train.lengths.mean()
        useful = min(target.most_tokens, share + least, int(_ITEMS * mean))
        most = max(least, -(-max(default, useful) // _GRAIN) * _GRAIN)
        search = Search(lambda tokens: plans.resized(cut(tokens)), _needed, room, grain=_GRAIN)
        with report.taking(*PLANNING):
            tokens = _largest(search, least, most)
            found = with_changes(search.found[tokens], cut(tokens), plans, report)
    except (forge_algos.RehearsalError, forge_dist.ModelError) as error:
        return None, "no memory plan can be made", MemoryPlan(target=target, ranks=planned.ranks, refused=str(error))
    takes = f"{size(_needed(found))} of {room_of(target)}"
    if _needed(found) > room and found.fits is False:
        why = "the longest sample, which does not fit"
    elif tokens == most > least:
        why = "more would not be faster"
    else:
        why = "the most that fits" if tokens > least else "the longest sample"
    return tokens, f"memory plan: {why}, {takes} on {target.name}", found


def choose_checkpointing(planned: Planned | None, target: Target | None, report: Reporter) -> tuple[str, str]:
    """Find the activation checkpointing that recomputes least and fits: none, selective or full.

    Args:
        planned: the run, with the tokens that it takes; None where no plan is worth its time.
        target: devices that it is to fit.
        report: gets what is being tried.

    Returns:
        The kind, and the reason.

    """
    if planned is None or target is None:
        return KINDS[0], "a model this small fits"
    if target.limit is None:
        return KINDS[0], f"the memory of {target.name} is not known"
    room, tokens = int(_FILLED * target.limit), planned.settings.plan.max_tokens_per_gpu
    needed, plans = 0, Plans(target)
    try:
        with report.taking(*PLANNING):
            for kind in KINDS:
                settings = planned.settings.with_value("strategy", "activation_checkpointing", kind)
                needed = _needed(plans.of(attrs.evolve(planned, settings=settings)))
                if needed <= room:
                    return kind, f"memory plan: {size(needed)} of {room_of(target)} on {target.name} with {tokens:,} tokens"
    except (forge_algos.RehearsalError, forge_dist.ModelError):
        return KINDS[-1], "no memory plan can be made"
    return KINDS[-1], f"memory plan: even so {size(needed)} of {room_of(target)} on {target.name} with {tokens:,} tokens"


def _largest(search: Search, least: int, most: int) -> int:
    """Return the largest micro-batch of `least` to `most` tokens found to fit, else `least`."""
    first = min(most, max(_FIRST, 2 * least))
    below, above = (first, None) if search.fits(first) else (least, first)
    if below == most or not search.fits(below):
        return below
    return search.grow(below, above, most)


def _needed(plan: MemoryPlan) -> int:
    """Return the bytes of the phases that depend on the size of a micro-batch."""
    return max(phase.planned for phase in plan.phases if phase.name in ("step", "evaluation", ROLLOUT))


def _share_of_step(plan: forge_packing.BatchPlan) -> int:
    """Return the most tokens that a rank has in a step, where they are divided evenly."""
    tokens = plan.tokens[: LOOKED_AT if plan.endless else min(plan.num_steps, LOOKED_AT)]
    return -(-int(max(tokens)) // plan.world_size)
