"""Run with images, before its model is loaded → how that will take its rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import forge_algos
import forge_dist
from forge.memory._outline import outline_of
from forge.memory._planned import Planned
from forge.tasks._media import media_documents, media_inputs, media_join

_found: dict[Any, tuple[Any, Any]] = {}
"""Model, its rows and documents of this process's run → what was found, and the documents: a run asks several times."""


def expected_rows(planned: Planned) -> Any:
    """Return `forge_algos.Rehearsal.media_rows` of a run's model.

    None where the rows hold one sample, or the model needs values.
    """
    s = planned.settings
    documents = media_documents(s, planned.tokenizer, planned.train, planned.held_out)
    if not documents or not media_join(s, planned.train.store, planned.held_out and planned.held_out.store):
        return None
    packing = planned.packed and s.packing.packing != "off"
    key = planned.model_path, str(planned.task.model_task(s)), planned.attention.name, packing, id(documents)
    if key not in _found:
        _found.clear()
        _found[key] = _expected(planned, documents, packing=packing), documents
    return _found[key][0]


def _expected(planned: Planned, documents: list[forge_algos.MediaDocument], *, packing: bool) -> Any:
    rehearsal = forge_algos.Rehearsal(device=planned.machine.device.value, autocast=planned.autocast)
    try:
        outline = rehearsal.model(outline_of(planned, planned.model_path, frozen=True), planned.draft, packed=planned.packed)
        return rehearsal.media_rows(
            rehearsal.placed(outline),
            [*documents] * 2,
            packing=packing,
            join=partial(media_inputs(planned.settings).join, more=True),
        )
    except (forge_algos.RehearsalError, forge_dist.ModelError):
        return None
