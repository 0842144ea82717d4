"""Run as it is planned → the outline of a model of it, on the meta device."""

from __future__ import annotations

from typing import Any

import forge_dist
from forge.memory._planned import Planned
from forge.tasks._parts import held_dtype, loaded_parts


def outline_of(planned: Planned, path: str, *, frozen: bool = False, initial: bool = False) -> Any:
    """Make the outline of the run's model, or of a frozen one.

    `initial` is the one that the run begins with.
    """
    return forge_dist.outline_model(
        forge_dist.LoadRequest(
            model_path=path,
            dtype=planned.dtype if frozen else held_dtype(planned.settings, path, planned.dtype),
            attention=planned.attention.name,
            attention_function=planned.attention.function,
            task=planned.task.model_task(planned.settings),
            # As it is loaded: float32 beside float32.
            other_dtype=planned.dtype if (planned.media or planned.shown) and planned.dtype.itemsize == 4 else None,
            trained=("language_model",) if frozen else loaded_parts(planned.settings),
            **({} if frozen and not initial else planned.loading),
        )
    )
