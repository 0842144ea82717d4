"""Batch plan over the rows of a store → micro-batches of each step, and the held-out loss."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import forge_algos
import forge_packing
from forge.settings._settings import row_tokens
from forge.tasks._seeds import step_seed
from forge.tasks._task import Evaluation, Run
from forge.tasks.items._items import Ints, Items, padding
from forge.tasks.items._media import read_ahead

T = TypeVar("T")


class OfflineSteps:
    """Steps of the supervised and preference verbs: rows of the data as they stand."""

    average: forge_algos.WeightAverage | None = None

    def __init__(self, run: Run, objective: forge_algos.Objective) -> None:
        self.objective = objective
        self.run = run
        self._eval_rows = [] if run.held_out is None else shard_of(run, run.held_out)

    def check_start(self) -> None:
        """Check nothing: no reference is involved."""

    def steps(self, first: int) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches of each step."""
        run = self.run
        batches = map(self._batches, run.steps_from(first))
        # A device other than the host computes a step while the host puts the next one together.
        ahead = run.device.type != "cpu"
        for step, found in zip(run.steps_from(first), one_ahead(batches) if ahead else batches, strict=False):
            # Random numbers follow from the position, so that a resumed run draws the same ones.
            run.machine.seed(step_seed(run.settings.plan.seed, step, run.strategy.data_parallel_rank))
            yield found

    def _batches(self, step: int) -> list[Any]:
        run = self.run
        return read_ahead([run.train.batch(rows) for rows in run.plan.micro_batches(step, run.strategy.data_parallel_rank)])

    def evaluate(self, model: Any) -> Evaluation | None:
        """Compute the objective's loss and figures over the held-out rows."""
        run = self.run
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
        return Evaluation(loss=found.loss, count=found.loss_count, unit=self.objective.unit, figures=found.figures)

    def held_out_rows(self) -> Iterator[Any]:
        """Yield packed rows: documents, or of preferences the answers with their prompts."""
        held_out: Any = self.run.held_out
        for rows in self._eval_rows:
            batch: Any = held_out.batch(rows)
            yield getattr(batch, "groups", getattr(batch, "completions", getattr(batch, "row", batch)))


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterator, the next of which is made in a thread meanwhile.

    What making one raises is raised in its turn.
    """
    with ThreadPoolExecutor(1, "next-step") as pool:
        coming = pool.submit(next, items, None)
        while (found := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield found


def shard_of(run: Run, items: Items, rows: Ints | None = None) -> list[Any]:
    """Divide items, or those of `rows`, into micro-batches, equally many a shard; return ours."""
    shared = getattr(items, "planned", {})
    if rows is not None:
        of_items = {name: of for name, of in shared.items() if name != "prefix_tokens" and of is not None}
        shared = {**shared, **{name: of[rows] for name, of in of_items.items()}}
    divided = forge_packing.divide(
        items.lengths if rows is None else items.lengths[rows],
        max_tokens=row_tokens(run.settings),
        world_size=run.strategy.data_parallel_size,
        **padding(run.settings, items, rows),
        **shared,
    )
    return list(divided[run.strategy.data_parallel_rank])
