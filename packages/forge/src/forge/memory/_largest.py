"""Batch plan of a run → the micro-batches that take the most memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

import forge_packing
from forge.memory._planned import Planned
from forge.settings._settings import row_tokens
from forge.tasks._fullest_rows import with_keys
from forge.tasks._media import pads_media
from forge.tasks._rollouts import LOOKED_AT
from forge.tasks.items._items import Items, padding
from forge.tasks.items._prompts import Prompts
from forge.tasks.items._samples import Conversations

_VIRTUAL_AS = (1, 1 / 4, 1 / 16)
"""Parts of a token's memory that a virtual one of adapter=prefix may take, as models have it: it is keys and values alone."""


def largest_micro_batches(planned: Planned) -> list[tuple[Any, bool]]:
    """Return the micro-batches that may take the most memory, each as `largest_micro_batch`."""
    s = planned.settings
    if planned.media and planned.media_rows == "lines" and not isinstance(planned.train, Prompts):
        return _largest_lines(planned.plan, planned.train)
    if planned.media and not isinstance(planned.train, Prompts):
        found = [largest_micro_batch(planned.plan), _most_media(planned, "tokens")]
        if pads_media(s, planned.tokenizer):
            found.append(_most_media(planned, "padded"))
        if "audio" in planned.train.store.media_kinds:
            # Many towers are given 30 s of each clip, however few tokens stand for it (Whisper's).
            found.append(_most_media(planned, "number"))
        return list({rows.tobytes(): (rows, several) for rows, several in found}.values())
    if s.adapter.adapter != "prefix" or isinstance(planned.train, Prompts):
        return [largest_micro_batch(planned.plan)]
    spared = [s.adapter.num_virtual_tokens * (1 - part) for part in _VIRTUAL_AS]
    found = (largest_micro_batch(planned.plan, spared=each) for each in spared)
    return list({(rows.tobytes(), several): (rows, several) for rows, several in found}.values())


def largest_micro_batch(plan: forge_packing.BatchPlan, *, spared: float = 0) -> tuple[Any, bool]:
    """Return the samples of the largest micro-batch, and whether its step has several.

    `spared` are the places of each line that count nothing.
    """
    best, several, most = None, False, -1.0
    for step in range(LOOKED_AT if plan.endless else min(plan.num_steps, LOOKED_AT)):
        for rank in range(plan.world_size):
            rows = plan.micro_batches(step, rank)
            for row in rows:
                tokens = with_keys(plan.places(row), int(plan.lengths[row].sum())) - spared * _lines(plan, row)
                if tokens > most:
                    best, several, most = row, len(rows) > 1, tokens
    assert best is not None
    return best, several


def _most_media(planned: Planned, of: Literal["tokens", "padded", "number"]) -> tuple[Any, bool]:
    """Return the micro-batch with the most tokens of media, or the most media.

    And whether its step has several. Padded, each counts as the largest of its micro-batch, or each item as the one with the
    most.
    """
    items: Any = planned.train
    plan, (media, tokens) = planned.plan, items.media_counts.T
    each_tokens = tokens / np.maximum(media, 1)

    def size(rows: Any) -> float:
        if of != "padded":
            return float((tokens if of == "tokens" else media)[rows].sum())
        return max(media[rows].sum() * each_tokens[rows].max(), (media[rows] > 0).sum() * tokens[rows].max())

    steps = range(LOOKED_AT if plan.endless else min(plan.num_steps, LOOKED_AT))
    each = (plan.micro_batches(step, rank) for step in steps for rank in range(plan.world_size))
    return max(((row, len(rows) > 1) for rows in each for row in rows), key=lambda found: size(found[0]))


_NEARLY = 4
"""Micro-batches with nearly the most of all that are rehearsed too."""


def _largest_lines(plan: forge_packing.BatchPlan, items: Any) -> list[tuple[Any, bool]]:
    """Return the micro-batches that may take the most, where rows with images are padded.

    They have the most places, mask, tokens of images, learned tokens, and of all these together. Those of text are packed
    beside them, each row under a mask of its own. The widest come first in a step, when
    there are no gradients; so those that come later are looked at by themselves.
    """
    steps = range(LOOKED_AT if plan.endless else min(plan.num_steps, LOOKED_AT))
    each = [plan.micro_batches(step, rank) for step in steps for rank in range(plan.world_size)]
    found = [(rows[0], False) for rows in each if len(rows)], [(row, True) for rows in each for row in rows[1:]]
    return [row for part in found if part for row in _most_of_each(plan, items, part)]


def _most_of_each(plan: forge_packing.BatchPlan, items: Any, found: list[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
    tokens = items.media_counts[:, 1]
    sizes = [(plan.places(row), int(tokens[row].sum()), int(items.loss_counts[row].sum())) for row, _ in found]
    # What these say is rough: of the first ones the micro-batches themselves are looked at.
    together = _together(sizes)
    chosen = sorted(range(len(found)), key=lambda at: -together[at])[:_COLLATED]
    for by in range(len(sizes[0])):
        chosen += sorted(range(len(found)), key=lambda at, by=by: -sizes[at][by])[: _COLLATED // 4]
    chosen = list(dict.fromkeys(chosen))
    features = [(*_places_and_mask(items.batch(found[at][0])), *sizes[at][1:]) for at in chosen]
    together = _together(features)
    best = {max(range(len(chosen)), key=lambda at, by=by: (features[at][by], together[at])) for by in range(len(features[0]))}
    nearly = [int(at) for at in together.argsort()[::-1][:_NEARLY] if together[at] >= 0.95 * together.max()]
    return [found[chosen[at]] for at in sorted({*best, *nearly})]


def _together(sizes: Sequence[tuple[int, ...]]) -> Any:
    """Return float[M], the sum of what each has of the most of each size."""
    array = np.array(sizes)
    return (array / np.maximum(array.max(axis=0), 1)).sum(axis=1)


def _places_and_mask(batch: Any) -> tuple[int, int]:
    """Return the places of the row that is learned, and those of its mask."""
    row = next((getattr(batch, name) for name in ("completions", "groups", "row") if hasattr(batch, name)), batch)
    lengths = np.diff(row.cu_seqlens)
    if getattr(row, "media_inputs", None) is None:
        return int(lengths.sum()), int(lengths.sum()) ** 2
    return len(lengths) * int(lengths.max()), len(lengths) * int(lengths.max()) ** 2


def _lines(plan: forge_packing.BatchPlan, rows: Any) -> int:
    return len(rows) if plan.lines is None else int(plan.lines[rows].sum())


_COLLATED = 128
"""Micro-batches that are put together to find the one of which most is computed: so many of the largest, and of the others."""


def largest_batch(plan: forge_packing.BatchPlan, items: Items, worst: Any) -> Any:
    """Return the micro-batch of which most is computed, which need not be the largest."""
    batch = items.batch(worst)
    if getattr(items, "media_rows", "") == "lines" or not (
        getattr(items, "share_prefix", False) or isinstance(items, Conversations)
    ):
        return batch
    steps = range(LOOKED_AT if plan.endless else min(plan.num_steps, LOOKED_AT))
    rows = [row for step in steps for rank in range(plan.world_size) for row in plan.micro_batches(step, rank)]
    rows.sort(key=partial(_most_computed, plan, items), reverse=True)
    most = computed_tokens(batch)
    for row in [*rows[:_COLLATED], *rows[_COLLATED :: max(1, len(rows) // _COLLATED)]]:
        if _most_computed(plan, items, row) <= most:
            break
        if (tokens := computed_tokens(found := items.batch(row))) > most:
            batch, most = found, tokens
    return batch


def _most_computed(plan: forge_packing.BatchPlan, items: Items, rows: Any) -> int:
    """Count what `computed_tokens` finds in a micro-batch at most."""
    if not isinstance(items, Conversations):
        return with_keys(plan.places(rows), int(plan.lengths[rows].sum()))
    repeated = int(items.unshared[rows].sum())
    return with_keys(plan.places(rows), repeated) if items.share_history else repeated


def computed_tokens(batch: Any) -> int:
    """Count the tokens that go through the model, and gathered keys as tokens that take as much."""
    whole: Any = (getattr(batch, "groups", batch),)
    both = (batch.completions, batch.mismatched) if hasattr(batch, "completions") else whole
    parts = [part for part in both if part is not None]
    gathered = (getattr(part, "kv_rows", None) for part in parts)
    tokens = [len(part.input_ids) for part in parts]
    return with_keys(sum(tokens), sum(own if rows is None else len(rows) for own, rows in zip(tokens, gathered, strict=True)))


def largest_held_out(planned: Planned, items: Items) -> Any:
    """Return the micro-batch of held-out items of which most is computed."""
    plan, s = _held_out_plan(planned, items), planned.settings
    spared = s.adapter.num_virtual_tokens * (1 - _VIRTUAL_AS[-1]) if s.adapter.adapter == "prefix" else 0
    worst, _ = largest_micro_batch(plan, spared=spared)
    return largest_batch(plan, items, worst)


def _held_out_plan(planned: Planned, items: Items) -> forge_packing.BatchPlan:
    """Plan the measuring of held-out items, as they share tokens now, as one step."""
    return forge_packing.plan(
        items.lengths,
        batch_size=max(len(items), planned.plan.world_size),
        max_tokens=row_tokens(planned.settings),
        world_size=planned.plan.world_size,
        shuffle=False,
        **padding(planned.settings, items),
        **getattr(items, "planned", {}),
    )
