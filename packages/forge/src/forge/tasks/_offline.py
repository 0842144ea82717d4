"""A run whose steps are rows of the data as they stand: what each step holds, and how held-out rows are measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import forge_algos
import forge_packing
from forge.run._resume import step_seed
from forge.tasks._task import Ints, Measured, Run


class Offline:
    """The work of supervised and preference verbs."""

    def __init__(self, run: Run, objective: forge_algos.Objective) -> None:
        self.objective = objective
        self._run = run
        self._eval_rows = [] if run.held_out is None else divided(run, run.held_out.lengths)

    def first(self) -> None:
        """Nothing but the data and the model has to hold."""

    def steps(self, first: int) -> Iterator[list[Any]]:
        """This rank's micro-batches of each step."""
        run = self._run
        for step in range(first, run.num_steps):
            # Random numbers follow from the position, so that a run that goes on draws what it would have drawn.
            run.machine.seed(step_seed(run.settings.plan.seed, step, run.ranks.rank))
            yield [run.train.batch(rows) for rows in run.plan.micro_batches(step, run.ranks.rank)]

    def measure(self, model: Any) -> Measured | None:
        """The objective's loss and figures over the held-out rows."""
        run = self._run
        if run.held_out is None:
            return None
        found = forge_algos.evaluate(
            model,
            (run.held_out.batch(rows) for rows in self._eval_rows),
            objective=self.objective,
            device=run.device,
            autocast=run.autocast,
            parallel=run.strategy,
        )
        return Measured(loss=found.loss, count=found.loss_count, unit=self.objective.unit, figures=found.figures)


def divided(run: Run, lengths: Ints) -> list[Any]:
    """This rank's share of items of these lengths in micro-batches, of which every rank has equally many."""
    most = run.settings.plan.max_tokens_per_gpu
    return list(forge_packing.divide(lengths, max_tokens=most, world_size=run.ranks.world_size)[run.ranks.rank])
