"""Planned run → its memory plan, with settings that take less where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import attrs

import forge_accel
import forge_algos
import forge_dist
import forge_packing
from forge.memory._forecast import Rehearsed, largest_micro_batch, plan_of
from forge.memory._memory_plan import Change, MemoryPlan
from forge.memory._planned import Planned
from forge.memory._target import Target
from forge.tasks.items._items import places
from forge.tasks.items._prompts import Prompts

_CHECKPOINTING = (
    ("selective", "what lies between matrix products is computed twice"),
    ("full", "about a third more time"),
)
"""Value of activation_checkpointing and its cost, the cheapest first."""


def forecast(planned: Planned, target: Target) -> MemoryPlan:
    """Compute the memory plan of a run; where that cannot be, it says why."""
    try:
        return with_changes(plan_of(Rehearsed.of(planned, target), target), planned, target)
    except (forge_algos.RehearsalError, forge_dist.ModelError) as error:
        return MemoryPlan(target=target, ranks=planned.ranks, refused=str(error))


def with_changes(made: MemoryPlan, planned: Planned, target: Target) -> MemoryPlan:
    """Add to the plan of a run that does not fit the settings with which it takes less.

    Args:
        made: the plan.
        planned: the run that it is of.
        target: devices that it is to fit.

    """
    if made.fits is not False or made.most is None:
        return made
    found = []
    for settings, cost, other in _changes(planned):
        try:
            tried = plan_of(Rehearsed.of(other, target), target)
        except (forge_algos.ForgeAlgosError, forge_dist.ForgeDistError, forge_packing.PackingError):
            continue
        if tried.most is not None and tried.most.planned < made.most.planned:
            found.append(Change(settings=settings, cost=cost, planned=tried.most.planned, fits=tried.fits is True))
    return attrs.evolve(made, changes=tuple(found))


def _changes(planned: Planned) -> Iterator[tuple[dict[str, object], str, Planned]]:
    """Yield settings that may lower a run's memory, their cost, and the run with them."""
    s = planned.settings

    def run_with(group: str, name: str, value: object, of: Any = s) -> Planned:
        return attrs.evolve(planned, settings=of.with_value(group, name, value))

    if (tokens := _fewer_tokens(planned)) < s.plan.max_tokens_per_gpu:
        also = ", and completions in smaller batches" if isinstance(planned.train, Prompts) else ""
        with suppress(forge_packing.PackingError):
            smaller = planned.plan.reshape(max_tokens=tokens * s.strategy.cp_size)
            other = attrs.evolve(run_with("plan", "max_tokens_per_gpu", tokens), plan=smaller)
            yield {"max_tokens_per_gpu": tokens}, f"the same steps in more, smaller micro-batches{also}", other
    for kind, cost in _CHECKPOINTING if s.strategy.activation_checkpointing == "none" else ():
        yield {"activation_checkpointing": kind}, cost, run_with("strategy", "activation_checkpointing", kind)
    if s.optimizer.optimizer == "adamw" and find_spec("bitsandbytes"):
        rounded = run_with("optimizer", "optimizer", "adamw_8bit")
        yield {"optimizer": "adamw_8bit"}, "moments are rounded to 8 bits", rounded
        if planned.dtype == forge_accel.bfloat16 and s.adapter.adapter == "none":
            other = run_with("device", "weights", "bfloat16", rounded.settings)
            yield {"weights": "bfloat16"}, "steps are rounded to bfloat16, at random, and moments to 8 bits", other
    if not planned.frozen and s.adapter.adapter == "none":
        with suppress(ValueError):
            yield {"adapter": "lora"}, "trains low-rank updates, no more", run_with("adapter", "adapter", "lora")
    if planned.ranks > 1 and planned.strategy == "ddp" and not planned.frozen:
        yield {"strategy": "fsdp2"}, "ranks exchange weights in every forward", attrs.evolve(planned, strategy="fsdp2")


def _fewer_tokens(planned: Planned) -> int:
    """Return half of the tokens of the largest micro-batch, or the longest sample's."""
    s = planned.settings
    longest = max(int(places(s, part).max()) for part in (planned.train, planned.held_out) if part is not None)
    if isinstance(planned.train, Prompts):
        return max(longest, s.plan.max_tokens_per_gpu // 2)
    worst, _ = largest_micro_batch(planned.plan)
    return -(-max(planned.plan.places(worst[: (len(worst) + 1) // 2]), longest) // s.strategy.cp_size)
