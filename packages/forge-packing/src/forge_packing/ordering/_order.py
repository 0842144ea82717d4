"""Order of a run: seed and position → samples; step → position. Independent of ranks.

A position is one integer: the number of samples that the run has seen. Only a few numbers are held, and where sources are
mixed an index of them; so a run of a billion steps takes the memory of one of a thousand.
"""

from functools import cached_property

import attrs
import numpy as np

from forge_packing._checks import Int64Array
from forge_packing.ordering._mixture import draws
from forge_packing.ordering._permutation import shuffled

FURTHEST = 2**62
"""The last position of a mixture, as its draws are int64: at a billion samples a second it takes a century."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class Order:
    """Order of a run over N samples."""

    num_samples: int
    """N."""
    batch_size: int
    """Samples in a step."""
    seed: int
    """Seed of the shuffling."""
    epochs: int | None
    """Epochs in the run; None is endless, unless max_steps ends it."""
    max_steps: int | None
    """Most steps in the run; None sets no limit."""
    shuffle: bool
    """Whether epochs are shuffled; False keeps the order of the data."""
    drop_last: bool
    """Whether the short step at the end of an epoch is left out."""
    sources: Int64Array | None = None
    """int64[N]: the source of each sample, 0 to M-1; needed where there are shares."""
    shares: Int64Array | None = None
    """int64[M]: draws of each source in every sum(shares); None is no mixture, every sample once an epoch."""

    @cached_property
    def per_epoch(self) -> int:
        """Samples in an epoch: N, less those of a short last step that drop_last leaves out."""
        return self.num_samples // self.batch_size * self.batch_size if self.drop_last else self.num_samples

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch. No step crosses its end, so the last may be short."""
        return -(-self.per_epoch // self.batch_size)

    @cached_property
    def num_steps(self) -> int | None:
        """Steps in the run; None where it is endless."""
        whole = None if self.epochs is None else self.epochs * self.steps_per_epoch
        limits = [limit for limit in (whole, self.max_steps) if limit is not None]
        return min(limits) if limits else None

    def position(self, step: int) -> int:
        """Return the number of samples before a step."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.per_epoch + within * self.batch_size

    def step_at(self, position: int) -> int:
        """Return the step of the sample at a position."""
        epoch, within = divmod(position, self.per_epoch)
        return epoch * self.steps_per_epoch + within // self.batch_size

    def starts(self, first: int, stop: int) -> Int64Array:
        """Return where steps begin in `samples(first, stop)`, and its size: int64[steps+1]."""
        base = self.position(first)
        epoch, within = divmod(first, self.steps_per_epoch)
        at = within + np.arange(stop - first + 1, dtype=np.int64)
        epochs, within_epoch = np.divmod(at, self.steps_per_epoch)
        return epochs * self.per_epoch + within_epoch * self.batch_size - (base - epoch * self.per_epoch)

    def samples(self, first: int, stop: int) -> Int64Array:
        """Return the samples of the steps from first to stop, one after another: int64[P]."""
        return self.drawn(self.position(first), self.position(stop))

    def drawn(self, start: int, stop: int) -> Int64Array:
        """Return the samples at the positions from start to stop: int64[stop-start]."""
        if self.shares is not None:
            return self._mixture(start, stop)
        parts = []
        for epoch in range(start // self.per_epoch, -(-stop // self.per_epoch)):
            before = epoch * self.per_epoch
            places = np.arange(max(start - before, 0), min(stop - before, self.per_epoch), dtype=np.int64)
            parts.append(self._places(places, self.num_samples, epoch, 0))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _places(self, places_P: Int64Array, size: int, epoch: int, source: int) -> Int64Array:
        if not self.shuffle:
            return places_P
        return shuffled(places_P, size, seed=self.seed, epoch=epoch, source=source)

    def _mixture(self, start: int, stop: int) -> Int64Array:
        """Return samples of a mixture, each source in an order of its own, anew on each pass."""
        assert self.shares is not None
        if stop > FURTHEST:
            raise IndexError(f"position {stop} is out of range: draws of weighted sources are counted up to {FURTHEST}")
        members_N, source_starts = self._members
        source_P, nth_P = draws(self.shares, start, stop)
        found = np.empty(stop - start, dtype=np.int64)
        by_source = np.argsort(source_P, kind="stable")
        cuts = np.searchsorted(source_P[by_source], np.arange(1, self.shares.size))
        for source, here in enumerate(np.split(by_source, cuts)):
            if here.size == 0:
                continue
            first, size = int(source_starts[source]), int(source_starts[source + 1] - source_starts[source])
            nth = nth_P[here]
            # Draws of one source come in its order, so those of one pass over it lie side by side.
            epochs = range(int(nth[0]) // size, int(nth[-1]) // size + 1)
            ends = np.searchsorted(nth, [epoch * size for epoch in epochs[1:]])
            for epoch, at, these in zip(epochs, np.split(here, ends), np.split(nth, ends), strict=True):
                found[at] = members_N[first + self._places(these - epoch * size, size, epoch, source)]
        return found

    @cached_property
    def _members(self) -> tuple[Int64Array, Int64Array]:
        """Samples source by source, int64[N], and where each source begins in them, int64[M+1]."""
        assert self.sources is not None
        assert self.shares is not None
        counts = np.bincount(self.sources, minlength=self.shares.size)
        return np.argsort(self.sources, kind="stable"), np.concatenate([[0], np.cumsum(counts)])
