"""BatchPlan: what says step → rank → micro-batch → samples; asked by step, reshaped, saved, loaded, checked, summed up."""

import os
from functools import cached_property
from typing import Any, Self

import attrs

from forge_packing._checks import Int64Array
from forge_packing._errors import PackingError
from forge_packing.dividing._cost import Cost
from forge_packing.ordering._order import Order
from forge_packing.planning import _file as _plan_file
from forge_packing.planning._figures import StepFigures, step_figures
from forge_packing.planning._inputs import checked
from forge_packing.planning._step_sums import StepSums, in_range, num_steps
from forge_packing.planning._steps import Steps
from forge_packing.planning._summary import summarise
from forge_packing.planning._verify import verify


# Without slots, because cached_property needs a __dict__; without eq, because arrays have no single truth value:
# compare fingerprints.
@attrs.frozen(kw_only=True, eq=False, slots=False)
class BatchPlan:
    """Which sample is trained on in which step, on which rank, in which micro-batch; made by `plan`, or by `load`.

    It holds what it was made from; steps are worked out when they are asked for, always the same. Steps, ranks, epochs,
    positions and samples count from 0. Arrays are int64. Two plans are the same if their fingerprints are.
    """

    lengths: Int64Array = attrs.field(repr=False)
    """int64[N], read-only: tokens of each sample of the data."""
    loss_counts: Int64Array | None = attrs.field(repr=False)
    """int64[N]: tokens of each sample that a loss is counted for; None where that was not given."""
    sources: Int64Array | None = attrs.field(repr=False)
    """int64[N]: the source of each sample; None where no weights were given."""
    weights: Int64Array | None = attrs.field(repr=False)
    """int64[M]: the sources' shares, as their draws in every sum(weights); None where a sample comes once an epoch."""
    batch_size: int
    """Samples in a step; the last step of an epoch may have fewer."""
    max_tokens: int
    """Tokens in a micro-batch at most."""
    world_size: int
    """Ranks that a step is divided over."""
    seed: int
    epochs: int | None
    max_steps: int | None
    shuffle: bool
    drop_last: bool
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
        return Steps(order=order, lengths=self.lengths, max_tokens=self.max_tokens, world_size=self.world_size, cost=self.cost)

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
        """Samples that the whole run trains on; one that comes in three epochs counts three times. Raises PackingError."""
        return self._steps.order.position(self.num_steps)

    def samples(self, step: int) -> Int64Array:
        """int64[B], a copy: the step's samples in their order, over all ranks. Raises IndexError."""
        step = in_range("step", step, self._steps.order.num_steps)
        block = self._steps.ordered(step // self._steps.per_block)
        within = step - block.first
        return block.samples[block.step_starts[within] : block.step_starts[within + 1]].copy()

    def micro_batches(self, step: int, rank: int = 0) -> list[Int64Array]:
        """The step's work for one rank: int64 sample indices, a copy for each micro-batch. Raises IndexError.

        All ranks have the same number of them in a step; an empty one is a pass without samples, which a rank has to
        run all the same where the ranks meet in every pass.
        """
        step = in_range("step", step, self._steps.order.num_steps)
        rank = in_range("rank", rank, self.world_size)
        return self._steps.micro_batches(step, rank)

    def epoch(self, step: int) -> int:
        """The epoch that the step belongs to. Raises IndexError."""
        return in_range("step", step, self._steps.order.num_steps) // self._steps.order.steps_per_epoch

    def position(self, step: int) -> int:
        """Samples that the run has seen before this step; of `num_steps`, in all. Raises IndexError."""
        last = self._steps.order.num_steps
        return self._steps.order.position(in_range("step", step, None if last is None else last + 1))

    def step_at(self, position: int) -> int:
        """The step that goes on from here, for 0 to `num_samples`: `step_at(position(step))` is `step`. Raises IndexError.

        A position inside a step, as another batch size leaves it, gives that step.
        """
        end = None if self.endless else self.num_samples + 1
        return self._steps.order.step_at(in_range("position", position, end))

    @cached_property
    def tokens(self) -> StepSums:
        """Tokens in each step over all ranks: `plan.tokens[step]`, `plan.tokens[10:20]`, `numpy.asarray(plan.tokens)`."""
        return StepSums(self._steps, self.lengths)

    @cached_property
    def loss_tokens(self) -> StepSums:
        """What each step's summed loss is divided by, asked as `tokens` is. Raises PackingError without loss_counts."""
        if self.loss_counts is None:
            raise PackingError("this plan has no loss_tokens: it was made without loss_counts. Pass loss_counts to plan()")
        return StepSums(self._steps, self.loss_counts)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over all that the plan was made from, and the version of the way in which it is worked out."""
        return _plan_file.fingerprint(self)

    @cached_property
    def order_fingerprint(self) -> str:
        """sha256 (hex) over what decides `samples(step)` of any step: not the ranks, not the micro-batches, not the run's length.

        Two plans of which one goes on from the other's position agree in it.
        """
        return _plan_file.order_fingerprint(self)

    def reshape(self, *, world_size: int | None = None, max_tokens: int | None = None) -> Self:
        """The same steps over other ranks, or in micro-batches of another size: `samples(step)` stays. Raises PackingError."""
        changed = {"world_size": world_size, "max_tokens": max_tokens}
        given = {name: value for name, value in changed.items() if value is not None}
        return type(self)(**checked({**attrs.asdict(self, recurse=False), **given}))

    def figures(self, step: int) -> StepFigures:
        """What a step's division comes to, each figure beside its lower bound. Raises IndexError."""
        return step_figures(self, in_range("step", step, self._steps.order.num_steps))

    def check(self, most_steps: int | None = None) -> None:
        """Verify the laws of a plan; raises PackingError naming the first one that is broken, and where.

        Each sample at most once an epoch, and exactly once in an epoch that is not cut short (or, where sources are
        weighted, each share kept to within 2); every step has batch_size samples but the last of its epoch; a step's
        micro-batches hold its samples exactly; none is over max_tokens; all ranks have the same number of them.

        most_steps: look at about so many only, the first, the last and some between; an endless plan needs it.
        """
        verify(self, most_steps)

    def summary(self) -> str:
        """A few lines: samples, steps, tokens, micro-batches and makespan against their lower bounds, fill.

        Of a long run they measure some of its steps, and say which.
        """
        return summarise(self)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write one .npz under exactly this name: whole, or not at all. The directory must exist. Raises PackingError."""
        _plan_file.save(self, file)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. Raises PackingError for a file that is missing, torn, changed, or no plan.

        So it does where this machine or version would work out other steps than the one that saved it.
        """
        values: dict[str, Any] = _plan_file.load(file)
        loaded = cls(**values["inputs"])
        _plan_file.compare(loaded, file, values)
        return loaded
