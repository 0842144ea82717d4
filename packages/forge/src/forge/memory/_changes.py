"""Planned run → its memory plan, with settings that take less where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import attrs

import forge_accel
import forge_algos
import forge_dist
import forge_packing
from forge._progress import Reporter
from forge.memory._largest import largest_micro_batch
from forge.memory._long_rows import without_long_rows
from forge.memory._memory_plan import Change, MemoryPlan
from forge.memory._planned import Planned
from forge.memory._plans import PLANNING, Plans, Search
from forge.memory._target import Target
from forge.tasks.items._items import places
from forge.tasks.items._prompts import Prompts

_CHECKPOINTING = (
    ("selective", "what lies between matrix products is computed twice"),
    ("full", "about a third more time"),
)
"""Value of activation_checkpointing and its cost, the cheapest first."""
_REFUSED = (forge_algos.ForgeAlgosError, forge_dist.ForgeDistError, forge_packing.PackingError)
"""Errors of settings that the run cannot have."""
_GRAIN = 64
"""Sizes of micro-batches that are tried are multiples of this, and of twice as much from `_MANY` tokens on."""
_MANY = 2048


def forecast(planned: Planned, target: Target, report: Reporter) -> MemoryPlan:
    """Compute the memory plan of a run; where that cannot be, it says why."""
    plans = Plans(target)
    try:
        with report.taking(*PLANNING):
            return with_changes(plans.of(planned), planned, plans, report)
    except (forge_algos.RehearsalError, forge_dist.ModelError) as error:
        return MemoryPlan(target=target, ranks=planned.ranks, refused=str(error))


def with_changes(made: MemoryPlan, planned: Planned, plans: Plans, report: Reporter) -> MemoryPlan:
    """Add to the plan of a run that does not fit the settings with which it takes less.

    Args:
        made: the plan.
        planned: the run that it is of.
        plans: those of this run, for the same devices.
        report: gets what is being tried.

    """
    if made.fits is not False or made.most is None:
        return made
    also = ", and completions in smaller batches" if isinstance(planned.train, Prompts) else ""
    tried: list[tuple[dict[str, object], str, MemoryPlan]] = []
    with suppress(*_REFUSED):
        if (fewer := without_long_rows(planned)) is not None:
            report.doing(_trying(fewer.settings))
            tried.append((fewer.settings, fewer.cost, plans.resized(fewer.planned)))
    report.doing("memory: it does not fit; trying a lower max_tokens_per_gpu")
    with suppress(*_REFUSED):
        tokens, plan = _fewer_tokens(made, planned, plans)
        tried.append(({"max_tokens_per_gpu": tokens}, f"the same steps in more, smaller micro-batches{also}", plan))
    for settings, cost, other in _changes(planned):
        report.doing(_trying(settings))
        with suppress(*_REFUSED):
            tried.append((settings, cost, plans.of(other)))
    changes = tuple(
        Change(settings=settings, cost=cost, planned=plan.most.planned, fits=plan.fits is True)
        for settings, cost, plan in tried
        if plan.most is not None and plan.most.planned < made.most.planned
    )
    return attrs.evolve(made, changes=changes)


def _trying(settings: Mapping[str, object]) -> str:
    return "memory: it does not fit; trying " + " ".join(f"{name}={value}" for name, value in settings.items())


def _changes(planned: Planned) -> Iterator[tuple[dict[str, object], str, Planned]]:
    """Yield settings that may lower a run's memory, their cost, and the run with them."""
    s = planned.settings

    def run_with(group: str, name: str, value: object, of: Any = s) -> Planned:
        return attrs.evolve(planned, settings=of.with_value(group, name, value))

    for kind, cost in _CHECKPOINTING if s.strategy.activation_checkpointing == "none" else ():
        yield {"activation_checkpointing": kind}, cost, run_with("strategy", "activation_checkpointing", kind)
    if s.optimizer.optimizer == "adamw" and find_spec("bitsandbytes"):
        rounded = run_with("optimizer", "optimizer", "adamw_8bit")
        yield {"optimizer": "adamw_8bit"}, "moments are rounded to 8 bits", rounded
        if planned.dtype == forge_accel.bfloat16 and s.adapter.adapter == "none" and s.qat.qat is None:
            other = run_with("device", "weights", "bfloat16", rounded.settings)
            yield {"weights": "bfloat16"}, "steps are rounded to bfloat16, at random, and moments to 8 bits", other
    if not planned.frozen and s.adapter.adapter == "none" and s.qat.qat is None:
        with suppress(ValueError):
            yield {"adapter": "lora"}, "trains low-rank updates, no more", run_with("adapter", "adapter", "lora")
    if planned.ranks > 1 and planned.strategy == "ddp" and not planned.frozen:
        yield {"strategy": "fsdp2"}, "ranks exchange weights in every forward", attrs.evolve(planned, strategy="fsdp2")


def _fewer_tokens(made: MemoryPlan, planned: Planned, plans: Plans) -> tuple[int, MemoryPlan]:
    """Find the largest lower max_tokens_per_gpu that fits, or the lowest that may be given.

    It is returned with its plan, and is a multiple of 64 or 128, unless the longest sample lies between two of them.
    """
    s = planned.settings
    longest = max(int(places(s, part).max()) for part in (planned.train, planned.held_out) if part is not None)
    least = -(-longest // s.strategy.cp_size)
    if isinstance(planned.train, Prompts):
        most = s.plan.max_tokens_per_gpu
    else:
        worst, _ = largest_micro_batch(planned.plan)
        most = -(-planned.plan.places(worst) // s.strategy.cp_size)
    grain = _GRAIN if most < _MANY else 2 * _GRAIN
    plain = -(-least // grain) * grain
    least = plain if plain < most else least

    def with_tokens(tokens: int) -> MemoryPlan:
        smaller = planned.plan.reshape(max_tokens=tokens * s.strategy.cp_size)
        settings = s.with_value("plan", "max_tokens_per_gpu", tokens)
        return plans.resized(attrs.evolve(planned, settings=settings, plan=smaller))

    def needed(plan: MemoryPlan) -> int:
        return 0 if plan.most is None else plan.most.planned

    assert made.available is not None
    search = Search(with_tokens, needed, made.available, grain=grain)
    search.found[most] = made
    tokens = search.grow(least, most, most) if least < most and search.fits(least) else min(least, most)
    return tokens, search.found[tokens]
