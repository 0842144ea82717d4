"""BatchPlan: step → rank → micro-batch → samples, with figures, check, summary and file."""

import os
from functools import cached_property
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt

from forge_packing._checks import Int64Array
from forge_packing._errors import PackingError
from forge_packing.dividing._cost import Cost
from forge_packing.dividing._prefixes import Prefixes
from forge_packing.ordering._order import Order
from forge_packing.planning import _file
from forge_packing.planning._figures import StepFigures, micro_batch_costs, step_figures
from forge_packing.planning._inputs import checked
from forge_packing.planning._step_sums import StepSums, in_range, num_steps
from forge_packing.planning._steps import Steps
from forge_packing.planning._summary import summarise
from forge_packing.planning._verify import verify


# Without slots, because cached_property needs a __dict__; without eq, because arrays have no single truth value:
# compare fingerprints.
@attrs.frozen(kw_only=True, eq=False, slots=False)
class BatchPlan:
    """Plan of a run: the samples of each step, divided over ranks and micro-batches.

    Made by `plan`, or by `load`. It holds its inputs; steps are computed when they are asked for, always the same. Steps,
    ranks, epochs, positions and samples count from 0; one out of range raises IndexError. Arrays are int64. Two plans are the
    same if their fingerprints are.
    """

    lengths: Int64Array = attrs.field(repr=False)
    """int64[N], read-only: tokens of each sample of the data."""
    loss_counts: Int64Array | None = attrs.field(repr=False)
    """int64[N]: tokens of each sample that a loss is counted for; None where that was not given."""
    sources: Int64Array | None = attrs.field(repr=False)
    """int64[N]: the source of each sample; None where no weights were given."""
    weights: Int64Array | None = attrs.field(repr=False)
    """int64[M]: the sources' shares, as their draws in every sum(weights); None where a sample comes once an epoch."""
    widths: Int64Array | None = attrs.field(repr=False)
    """int64[N]: places of each line of a sample where micro-batches are padded; None where nothing is."""
    lines: Int64Array | None = attrs.field(repr=False)
    """int64[N]: lines of each sample where micro-batches are padded; None where nothing is."""
    prefixes: Int64Array | None = attrs.field(repr=False)
    """int64[N]: number of the prefix that each sample begins with, -1 for none; None where none is shared."""
    prefix_tokens: Int64Array | None = attrs.field(repr=False)
    """int64[G]: tokens of each prefix; None where none is shared."""
    repeated: Int64Array | None = attrs.field(repr=False)
    """int64[N]: tokens that each sample has twice and that take room once; None where none are shared."""
    batch_size: int
    """Samples in a step; the last step of an epoch may have fewer."""
    max_tokens: int
    """Tokens in a micro-batch at most."""
    world_size: int
    """R: ranks that a step is divided over."""
    seed: int
    """Seed of the order, 0 to 2**32 - 1."""
    epochs: int | None
    """Epochs after which the run ends; None where max_steps alone ends it, or nothing."""
    max_steps: int | None
    """Steps after which the run ends; None where epochs alone end it, or nothing."""
    shuffle: bool
    """Whether each epoch is shuffled; False keeps the order of the data."""
    drop_last: bool
    """Whether the short step at the end of an epoch is left out."""
    cost: Cost
    """What is balanced between ranks."""

    @cached_property
    def _steps(self) -> Steps:
        order = Order(
            num_samples=self.lengths.size,
            batch_size=self.batch_size,
            seed=self.seed,
            epochs=self.epochs,
            max_steps=self.max_steps,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            sources=self.sources,
            shares=self.weights,
        )
        return Steps(
            order=order,
            lengths=self.lengths,
            max_tokens=self.max_tokens,
            world_size=self.world_size,
            cost=self.cost,
            widths=self.widths,
            lines=self.lines,
            prefixes=None
            if self.prefixes is None or self.prefix_tokens is None
            else Prefixes(self.prefixes, self.prefix_tokens),
            repeated=self.repeated,
        )

    def _inputs(self) -> dict[str, Any]:
        return attrs.asdict(self, recurse=False)

    @property
    def endless(self) -> bool:
        """Whether the run has no end: epochs=None and no max_steps."""
        return self._steps.order.num_steps is None

    @property
    def num_steps(self) -> int:
        """Optimizer steps in the run. Raises PackingError for an endless one."""
        return num_steps(self._steps)

    @property
    def num_samples(self) -> int:
        """Samples in the run, those of each epoch counted anew. PackingError for an endless one."""
        return self._steps.order.position(self.num_steps)

    def samples(self, step: int) -> Int64Array:
        """Return the samples of a step over all ranks, in their order: a new int64[B]."""
        step = in_range("step", step, self._steps.order.num_steps)
        block = self._steps.ordered(step // self._steps.per_block)
        within = step - block.first
        return block.samples[block.step_starts[within] : block.step_starts[within + 1]].copy()

    def micro_batches(self, step: int, rank: int = 0) -> list[Int64Array]:
        """Return a rank's micro-batches of a step: a new int64 array of sample indices each.

        All ranks have the same number of them in a step. An empty one is a pass without samples, which the rank runs all the
        same where every pass has collectives.
        """
        step = in_range("step", step, self._steps.order.num_steps)
        rank = in_range("rank", rank, self.world_size)
        return self._steps.micro_batches(step, rank)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return in_range("step", step, self._steps.order.num_steps) // self._steps.order.steps_per_epoch

    def position(self, step: int) -> int:
        """Return the number of samples before a step; for `num_steps`, of the whole run."""
        last = self._steps.order.num_steps
        return self._steps.order.position(in_range("step", step, None if last is None else last + 1))

    def step_at(self, position: int) -> int:
        """Return the step at a position, 0 to `num_samples`: `step_at(position(step)) == step`.

        A position inside a step, as another batch size leaves it, gives that step.
        """
        end = None if self.endless else self.num_samples + 1
        return self._steps.order.step_at(in_range("position", position, end))

    @cached_property
    def tokens(self) -> StepSums:
        """Tokens of each step: `plan.tokens[step]`, `plan.tokens[10:20]`, `np.asarray(plan.tokens)`."""
        return StepSums(self._steps, self.lengths)

    @cached_property
    def loss_tokens(self) -> StepSums:
        """Loss tokens of each step, which divide its summed loss. PackingError without loss_counts.

        Where tokens have weights (`PackedBatch.weights`), the sum of these divides it, which the plan does not know.
        """
        if self.loss_counts is None:
            raise PackingError("this plan has no loss_tokens: it was made without loss_counts. Pass loss_counts to plan()")
        return StepSums(self._steps, self.loss_counts)

    def steps_to(self, loss_tokens: int) -> int:
        """Return the number of steps whose loss tokens together reach a budget.

        An endless plan reaches any number; another may end before, which gives `num_steps`. PackingError without loss_counts,
        or where no sample has a loss token.
        """
        learned = self.loss_tokens
        if loss_tokens < 1:
            raise PackingError(f"loss_tokens must be at least 1, got {loss_tokens}")
        assert self.loss_counts is not None
        order, done, first = self._steps.order, 0, 0
        # Samples that are left out are the same ones in every epoch only where nothing is shuffled.
        total = int(self.loss_counts[: None if order.shuffle else order.per_epoch].sum())
        if not total:
            raise PackingError("no step reaches any number of loss tokens: all loss_counts are 0")
        if order.shares is None and not (order.drop_last and order.shuffle):
            # Every epoch has the same sum.
            epochs = (loss_tokens - 1) // total
            done, first = epochs * total, epochs * order.steps_per_epoch
        end = order.num_steps
        while end is None or first < end:
            stop = first + self._steps.per_block if end is None else min(first + self._steps.per_block, end)
            reached = done + np.cumsum(learned[first:stop])
            if reached[-1] >= loss_tokens:
                return first + int(np.searchsorted(reached, loss_tokens)) + 1
            done, first = int(reached[-1]), stop
        assert end is not None
        return end

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of all inputs of the plan, and of the version of the planning."""
        return _file.fingerprint(self._inputs())

    @cached_property
    def order_fingerprint(self) -> str:
        """sha256 (hex) of what decides `samples(step)`.

        Ranks, micro-batches and the length of the run are not in it.

        A plan that continues another's run from its position has the same one.
        """
        return _file.order_fingerprint(self._inputs())

    def reshape(self, *, world_size: int | None = None, max_tokens: int | None = None) -> Self:
        """Plan the same steps for other ranks or another token budget; `samples(step)` stays.

        Raises PackingError for a shape that the samples do not fit.
        """
        changed = {"world_size": world_size, "max_tokens": max_tokens}
        given = {name: value for name, value in changed.items() if value is not None}
        return type(self)(**checked({**self._inputs(), **given}))

    def places(self, samples: npt.ArrayLike) -> int:
        """Count the places of samples in one micro-batch, what is shared once, padding included."""
        at = np.asarray(samples, dtype=np.int64)
        if self._steps.prefixes is not None:
            return int(self._steps.prefixes.pick(at).sizes(self._steps.room[at], np.zeros_like(at), 1)[0])
        if self.widths is None or not at.size:
            return int(self._steps.room[at].sum())
        widths, lines = self._steps.padded(at)
        return int(lines.sum() * widths.max())

    def cost_of(self, samples: npt.ArrayLike) -> float:
        """Return the cost of samples in one micro-batch, shared prefixes once, by `cost`."""
        at = np.asarray(samples, dtype=np.int64)
        return float(micro_batch_costs(self._steps, at, np.zeros_like(at), 1)[0])

    def alone(self, *, repeat: bool = True) -> Self:
        """Plan the same steps for micro-batches that share no prefixes; `samples(step)` stays.

        With `repeat` samples have what they have twice computed twice, too.
        """
        repeated = None if repeat else self.repeated
        if self.prefixes is None and self.repeated is repeated:
            return self
        return type(self)(**checked({**self._inputs(), "prefixes": None, "prefix_tokens": None, "repeated": repeated}))

    def padded(self, widths: npt.ArrayLike, lines: npt.ArrayLike | None = None) -> Self:
        """Plan the same steps for micro-batches that are padded; `samples(step)` stays.

        Widths and lines are those of `plan`. Nothing is shared in it.
        """
        same = self.alone()
        return type(same)(**checked({**same._inputs(), "widths": widths, "lines": lines}))

    def until(self, *, epochs: int | None, max_steps: int | None) -> Self:
        """Plan the same steps with another end, as `plan` takes it; None and None is without end."""
        return type(self)(**checked({**self._inputs(), "epochs": epochs, "max_steps": max_steps}))

    def figures(self, step: int) -> StepFigures:
        """Return the figures of a step's division, each beside its lower bound."""
        return step_figures(self._steps, self.loss_counts, in_range("step", step, self._steps.order.num_steps))

    def check(self, most_steps: int | None = None) -> None:
        """Verify the laws of a plan; PackingError names the first one that is broken, and where.

        Each sample at most once an epoch, and exactly once in an epoch that is not cut short (or, where sources are
        weighted, each share kept to within 2); every step has batch_size samples but the last of its epoch; a step's
        micro-batches hold its samples exactly; none is over max_tokens; all ranks have the same number of them.

        Args:
            most_steps: Verify only about so many, the first, the last and some between; an endless plan needs it.

        """
        verify(self._steps, most_steps)

    def summary(self, items: str = "samples", *, divided: bool = True) -> str:
        """Return lines on samples, steps, tokens, micro-batches, their fill, and waiting ranks.

        Of a long run only some steps are measured, and the summary names them.

        Args:
            items: what is planned, such as `blocks` or `pairs`.
            divided: whether to say how ranks and micro-batches divide the steps; False for a trainer that divides otherwise.

        """
        return summarise(self._steps, self.loss_counts, items, divided=divided)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the plan to one .npz file of exactly this name, atomically. Raises PackingError.

        The directory must exist.
        """
        _file.save(file, self._inputs(), self._steps)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """Read a plan that `save` wrote; PackingError for a missing, torn, changed or other file.

        So it does where this machine or version would compute other steps than the one that saved it.
        """
        inputs, saved = _file.load(file)
        loaded = cls(**inputs)
        _file.compare(file, saved, inputs, loaded._steps)
        return loaded
