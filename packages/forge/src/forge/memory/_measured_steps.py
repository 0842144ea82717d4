"""Steps of a run that were measured → what they were planned to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import forge_algos
import forge_dist
from forge.memory._forecast import Derived, Rehearsed
from forge.memory._memory_plan import MEASURED, Phase
from forge.memory._planned import Planned
from forge.memory._target import Target

_AGREES = 0.01
"""Difference from what was measured, up to which memory that was derived from few blocks is taken for that of all."""


def forecast_steps(
    planned: Planned,
    target: Target,
    steps: Sequence[Sequence[Any]],
    *,
    measured: int,
    first: bool = True,
    compiled: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Phase | None:
    """Compute the memory of steps on these very micro-batches; None where that cannot be.

    It follows from few of the model's equal blocks; where that is not what was measured, all of them are rehearsed.

    Args:
        planned: the run.
        target: its machine.
        steps: the micro-batches of each.
        measured: bytes that the steps took.
        first: whether the optimizer has no state before the first of them.
        compiled: whether blocks were compiled, which keep less than what is rehearsed: no rehearsal is what was measured.
        check: called again and again; what it raises ends the computation.
    """

    def worst(made: Rehearsed | Derived) -> Phase:
        found = [made.run_step(list(batches), first=first and number == 0) for number, batches in enumerate(steps)]
        peak = max(found, key=lambda peak: peak.bytes)
        return Phase(name=MEASURED, planned=peak.bytes, parts=peak.parts)

    try:
        # Layers that `unfrozen_parameters` names may be none of the few.
        with suppress(forge_algos.RehearsalError, forge_algos.AdapterError):
            phase = worst(Derived.of(planned, target, check=check))
            if compiled or abs(phase.planned - measured) <= _AGREES * measured:
                return phase
        return worst(Rehearsed.of(planned, target, check=check))
    except (forge_algos.RehearsalError, forge_dist.ModelError):
        return None
