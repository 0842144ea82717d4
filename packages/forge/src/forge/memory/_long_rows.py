"""Run with few rows much longer than the rest → a `max_seq_len`, and the run without them."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import numpy as np

import forge_dist
from forge._counted import counted
from forge.memory._planned import Planned
from forge.tasks.items._items import Items, longest_row, places
from forge.tasks.items._pairs import Pairs
from forge.tasks.items._prompts import Prompts

_TIMES = 4
"""Times that a row is longer than all that stay, to be one that is left out."""
_FEW = 50
"""One row of so many may be left out, and one in any case."""
_GRAIN = 64
"""A limit is a multiple of so many tokens, or the model's positions."""


class WithoutLongRows(NamedTuple):
    """Run without its few longest rows."""

    settings: dict[str, object]
    """`max_seq_len`, and `max_tokens_per_gpu` where that was given."""
    cost: str
    """What is left out, with file and row of the longest."""
    planned: Planned


def without_long_rows(planned: Planned) -> WithoutLongRows | None:
    """Leave out few rows much longer than the rest, or than the model's positions.

    Returns:
        None where there are none, or where `max_seq_len` does not leave rows out.
    """
    s = planned.settings
    if isinstance(planned.train, Prompts) or getattr(s.data, "max_seq_len", "") == "":
        return None
    if {s.data.on_overflow, *s.data.own_values("on_overflow")} != {"drop"}:
        return None
    parts = [items for items in (planned.train, planned.held_out) if items is not None]
    lengths = np.concatenate([items.longest for items in parts])
    limit = _limit(planned, np.sort(lengths)[::-1])
    if limit is None:
        return None
    fewer = [found for items in parts if (found := _up_to(planned, items, limit)) is not None]
    if len(fewer) < len(parts):
        return None
    settings: dict[str, object] = {"max_seq_len": limit}
    longest = max(int(places(s, items).max()) for items in fewer)
    tokens = max(planned.machine.default_tokens, -(-longest // s.strategy.cp_size))
    if not s.origins["max_tokens_per_gpu"].startswith("chosen"):
        tokens = min(tokens, s.plan.max_tokens_per_gpu)
        if tokens < s.plan.max_tokens_per_gpu:
            settings["max_tokens_per_gpu"] = tokens
    s = s.with_value("data", "max_seq_len", limit).with_value("plan", "max_tokens_per_gpu", tokens)
    plan = planned.task.batch_plan(s, fewer[0], planned.plan.world_size)
    left_out = lengths > limit
    cost = (
        f"it leaves out {int(left_out.sum()):,} of {counted(len(lengths), 'rows')}, the longest of them {longest_row(parts)}; "
        f"the longest that stays has {int(lengths[~left_out].max()):,}"
    )
    changed = attrs.evolve(
        planned,
        settings=s,
        train=fewer[0],
        held_out=fewer[1] if len(fewer) > 1 else None,
        plan=plan,
        num_steps=planned.task.num_steps(s, plan),
    )
    return WithoutLongRows(settings, cost, changed)


def _limit(planned: Planned, descending: Any) -> int | None:
    """Return the tokens beyond which few rows are, given int64[N], the longest first."""
    longest = int(descending[0])
    positions = forge_dist.max_positions(planned.model_path, task=planned.task.model_task(planned.settings))
    after = descending[1 : 1 + max(1, len(descending) // _FEW)]
    stays = after[after * _TIMES <= longest]
    if not stays.size:
        return positions if positions is not None and descending[-1] <= positions < longest else None
    return positions if positions is not None and stays[0] <= positions < longest else -(-int(stays[0]) // _GRAIN) * _GRAIN


def _up_to(planned: Planned, items: Items, limit: int) -> Items | None:
    """Return the items of at most so many tokens; None for none, or items of several samples."""
    kept = np.flatnonzero(items.longest <= limit)
    if len(items) == len(items.store):
        samples = kept
    elif isinstance(items, Pairs):
        samples = items.rows[kept].reshape(-1)
    else:
        return None
    return planned.task.items(planned.settings, items.store.select(samples)) if kept.size else None
