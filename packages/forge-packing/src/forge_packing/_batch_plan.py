"""BatchPlan: arrays that say step → rank → micro-batch → samples; asked by step, saved, loaded, checked, summed up."""

import hashlib
import json
import operator
import os
from functools import cached_property
from typing import Any, Self

import attrs
import numpy as np

from forge_packing import _archive
from forge_packing._checks import Int64Array
from forge_packing._errors import PackingError
from forge_packing._laws import verify
from forge_packing._summary import summarise


def _frozen(array: Any) -> Int64Array:
    """A read-only int64 copy: what a fingerprint was taken of must not change afterwards."""
    copy = np.array(array, dtype=np.int64)
    copy.setflags(write=False)
    return copy


# Without slots, because cached_property needs a __dict__; without eq, because arrays have no single truth value:
# compare fingerprints.
@attrs.frozen(kw_only=True, eq=False, slots=False)
class BatchPlan:
    """Which sample is trained on in which step, on which rank, in which micro-batch; made by `plan`, or by `load`.

    Steps, ranks, epochs and samples count from 0. Arrays are int64. Two plans are the same if their fingerprints are.
    """

    lengths: Int64Array = attrs.field(converter=_frozen, repr=False)
    """int64[N]: tokens of each sample of the data."""
    loss_counts: Int64Array | None = attrs.field(converter=attrs.converters.optional(_frozen), repr=False)
    """int64[N]: tokens of each sample that a loss is counted for; None where that was not given."""
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

    # Private: [P] samples, step after step, where each step starts in them, and each step's epoch ...
    _order: Int64Array = attrs.field(alias="order", converter=_frozen, repr=False)
    _step_starts: Int64Array = attrs.field(alias="step_starts", converter=_frozen, repr=False)
    _step_epochs: Int64Array = attrs.field(alias="step_epochs", converter=_frozen, repr=False)
    # ... and [P] samples, micro-batch after micro-batch (by step, pass, rank), where each micro-batch starts in them, and
    # each step's first pass. A pass is one micro-batch on every rank.
    _members: Int64Array = attrs.field(alias="members", converter=_frozen, repr=False)
    _micro_batch_starts: Int64Array = attrs.field(alias="micro_batch_starts", converter=_frozen, repr=False)
    _pass_starts: Int64Array = attrs.field(alias="pass_starts", converter=_frozen, repr=False)

    @property
    def num_steps(self) -> int:
        """Optimizer steps in the run."""
        return self._step_epochs.size

    @property
    def num_samples(self) -> int:
        """Samples that the whole run trains on; one that comes in three epochs counts three times."""
        return self._order.size

    def samples(self, step: int) -> Int64Array:
        """int64[B], a copy: the step's samples in their order, over all ranks. Raises IndexError."""
        step = self._place("step", step, self.num_steps)
        return self._order[self._step_starts[step] : self._step_starts[step + 1]].copy()

    def micro_batches(self, step: int, rank: int = 0) -> list[Int64Array]:
        """The step's work for one rank: int64 sample indices, a copy for each micro-batch. Raises IndexError.

        All ranks have the same number of them in a step; an empty one is a pass without samples, which a rank has to
        run all the same where the ranks meet in every pass.
        """
        step = self._place("step", step, self.num_steps)
        rank = self._place("rank", rank, self.world_size)
        first, last = self._pass_starts[step] * self.world_size, self._pass_starts[step + 1] * self.world_size
        starts = self._micro_batch_starts
        return [self._members[starts[m] : starts[m + 1]].copy() for m in range(first + rank, last, self.world_size)]

    def epoch(self, step: int) -> int:
        """The epoch that the step belongs to. Raises IndexError."""
        return int(self._step_epochs[self._place("step", step, self.num_steps)])

    @cached_property
    def tokens(self) -> Int64Array:
        """int64[steps], read-only: tokens in each step over all ranks."""
        return self._step_sums(self.lengths)

    @cached_property
    def loss_tokens(self) -> Int64Array:
        """int64[steps], read-only: what a step's summed loss is divided by. Raises PackingError without loss_counts."""
        if self.loss_counts is None:
            raise PackingError("this plan has no loss_tokens: it was made without loss_counts. Pass loss_counts to plan()")
        return self._step_sums(self.loss_counts)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over every parameter and every array."""
        digest = hashlib.sha256(json.dumps(self._parameters(), sort_keys=True).encode())
        for name, array in self._arrays().items():
            digest.update(f"{name}:{array.size};".encode())
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def check(self) -> None:
        """Verify the laws of a plan; raises PackingError naming the first one that is broken, and where.

        Each sample at most once an epoch, and exactly once in an epoch that is not cut short; every step has batch_size
        samples but the last of its epoch; a step's micro-batches hold its samples exactly; none is over max_tokens; all
        ranks have the same number of them.
        """
        verify(self)

    def summary(self) -> str:
        """A few lines: samples, steps, tokens, micro-batches against the lower bound, fill."""
        return summarise(self)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write one .npz under exactly this name: whole, or not at all. The directory must exist. Raises PackingError."""
        _archive.write(file, {**self._parameters(), "fingerprint": self.fingerprint}, self._arrays())

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. Raises PackingError for a file that is missing, torn, changed, or no plan."""
        parameters, arrays = _archive.read(file)
        fingerprint = parameters.pop("fingerprint", None)
        values: dict[str, Any] = {"loss_counts": None, **parameters, **arrays}
        different = values.keys() ^ {field.alias for field in attrs.fields(cls)}
        if different:
            raise PackingError(
                f"{os.fspath(file)} is not a plan of this version: it differs in {sorted(different)}. Plan again"
            )
        loaded = cls(**values)
        if loaded.fingerprint != fingerprint:
            raise PackingError(f"{os.fspath(file)} was changed after it was saved: its fingerprint does not match. Plan again")
        loaded.check()
        return loaded

    def _parameters(self) -> dict[str, Any]:
        return {f.alias: getattr(self, f.name) for f in attrs.fields(type(self)) if f.converter is None}

    def _arrays(self) -> dict[str, Int64Array]:
        arrays = {f.alias: getattr(self, f.name) for f in attrs.fields(type(self)) if f.converter is not None}
        return {name: array for name, array in arrays.items() if array is not None}

    def _step_sums(self, values_N: Int64Array) -> Int64Array:
        sums = np.concatenate([[0], np.cumsum(values_N[self._order])])
        return _frozen(np.diff(sums[self._step_starts]))

    @staticmethod
    def _place(name: str, value: int, size: int) -> int:
        place = operator.index(value)
        if not 0 <= place < size:
            raise IndexError(f"{name} {place} is out of range: this plan has {size} ({name} 0 to {size - 1})")
        return place
