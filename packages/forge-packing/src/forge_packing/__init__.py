"""Batch plans and packed rows: which sample in which step, rank and micro-batch. No torch.

    lengths ── plan() ──▶ BatchPlan ── micro_batches(step, rank) ──▶ indices
    examples ── collate() ──▶ PackedBatch, one flat padding-free row
    completions of one prompt ── collate_groups() ──▶ PackedGroups, the prompt's tokens once or repeated
    turns of one conversation ── collate_turns() ──▶ PackedGroups, the common history once or repeated
    examples that begin alike ── collate_shared() ──▶ PackedGroups, their common prefix once
    lengths of documents ── split_documents() ──▶ Blocks, for pretraining on plain text

`divide` divides one step, `pack_rows` packs lengths into rows, and `find_prefixes` finds what samples begin with alike, so that
`plan` gives it room once. Names are imported when they are first used, so that
`import forge_packing` loads nothing else, and `PlanSettings` can be read without numpy.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.4.0"

if TYPE_CHECKING:
    from forge_packing._errors import PackingError as PackingError
    from forge_packing._settings import PlanSettings as PlanSettings
    from forge_packing.collating._blocks import Blocks as Blocks, split_documents as split_documents
    from forge_packing.collating._collate import PackedBatch as PackedBatch, collate as collate
    from forge_packing.collating._groups import (
        LEAST_PREFIX as LEAST_PREFIX,
        PackedGroups as PackedGroups,
        collate_groups as collate_groups,
        collate_shared as collate_shared,
        collate_turns as collate_turns,
    )
    from forge_packing.dividing._cost import Cost as Cost
    from forge_packing.dividing._divide import divide as divide
    from forge_packing.dividing._divide_shared import most_keys as most_keys
    from forge_packing.dividing._find_prefixes import find_prefixes as find_prefixes
    from forge_packing.dividing._pack_rows import pack_rows as pack_rows
    from forge_packing.dividing._padded import one_a_row as one_a_row
    from forge_packing.planning._batch_plan import BatchPlan as BatchPlan
    from forge_packing.planning._figures import StepFigures as StepFigures
    from forge_packing.planning._plan import plan as plan

# Each module with the public names that it defines; a module is imported when one of its names is first used.
_PUBLIC = {
    "_errors": "PackingError",
    "_settings": "PlanSettings",
    "collating._blocks": "Blocks split_documents",
    "collating._collate": "PackedBatch collate",
    "collating._groups": "LEAST_PREFIX PackedGroups collate_groups collate_shared collate_turns",
    "dividing._cost": "Cost",
    "dividing._divide": "divide",
    "dividing._divide_shared": "most_keys",
    "dividing._padded": "one_a_row",
    "dividing._find_prefixes": "find_prefixes",
    "dividing._pack_rows": "pack_rows",
    "planning._batch_plan": "BatchPlan",
    "planning._figures": "StepFigures",
    "planning._plan": "plan",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
