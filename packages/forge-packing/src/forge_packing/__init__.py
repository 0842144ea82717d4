"""Lengths to a plan (which sample in which step, rank and micro-batch); samples to flat arrays. No torch.

    lengths ── plan() ──▶ BatchPlan ── micro_batches(step, rank) ──▶ indices
    examples ── collate() ──▶ PackedBatch, one flat padding-free row
    prompts' completions ── collate_groups() ──▶ PackedGroups, the same with a prompt's tokens once
    documents' lengths ── split_documents() ──▶ Blocks, for training on plain text

`divide` and `pack_rows` are the pieces that `plan` is made of. Names are imported when they are first used, so that
`import forge_packing` loads nothing, and `PlanSettings` can be read without numpy.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.4.0"

if TYPE_CHECKING:
    from forge_packing._errors import PackingError
    from forge_packing._settings import PlanSettings
    from forge_packing.collating._blocks import Blocks, split_documents
    from forge_packing.collating._collate import PackedBatch, collate
    from forge_packing.collating._groups import PackedGroups, collate_groups
    from forge_packing.dividing._cost import Cost
    from forge_packing.dividing._divide import divide
    from forge_packing.dividing._pack_rows import pack_rows
    from forge_packing.planning._batch_plan import BatchPlan
    from forge_packing.planning._figures import StepFigures
    from forge_packing.planning._plan import plan

__all__ = [
    "BatchPlan",
    "Blocks",
    "Cost",
    "PackedBatch",
    "PackedGroups",
    "PackingError",
    "PlanSettings",
    "StepFigures",
    "collate",
    "collate_groups",
    "divide",
    "pack_rows",
    "plan",
    "split_documents",
]

_HOMES = {
    "BatchPlan": "planning._batch_plan",
    "Blocks": "collating._blocks",
    "Cost": "dividing._cost",
    "PackedBatch": "collating._collate",
    "PackedGroups": "collating._groups",
    "PackingError": "_errors",
    "PlanSettings": "_settings",
    "StepFigures": "planning._figures",
    "collate": "collating._collate",
    "collate_groups": "collating._groups",
    "divide": "dividing._divide",
    "pack_rows": "dividing._pack_rows",
    "plan": "planning._plan",
    "split_documents": "collating._blocks",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
