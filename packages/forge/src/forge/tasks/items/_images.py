"""Samples with images → rows whose forward is given what a processor makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import attrs

from forge._counted import counted

if TYPE_CHECKING:
    import forge_data
    import forge_packing
    from forge.tasks.items._items import Ints

ImageInputs = Sequence[Mapping[str, Any]]
"""Of each document of a row what a processor makes of its images."""
ImageRows = Literal["packed", "lines", "single"]
"""Whether a micro-batch with images is a packed row, padded lines, or one sample."""

_each = ThreadPoolExecutor(4, "images")
_next = ThreadPoolExecutor(1, "next-images")
"""Waits for `_each`, and so is another."""


def images_in_words(store: forge_data.TokenStore, counts: Ints) -> str:
    """Say how many images and tokens of images int64[N, 2] has; "" of a store without any."""
    if not store.has_images:
        return ""
    images, tokens = (int(number) for number in counts.sum(axis=0))
    rows = int((counts[:, 0] > 0).sum())
    each = ", counted in each of a row's samples" if len(store) > len(counts) else ""
    return f"; {counted(images, 'images')}{each}, for which {counted(tokens, 'tokens')} stand, in {rows:,} of the rows"


@attrs.frozen(kw_only=True, eq=False)
class ImageRow:
    """A packed row with images, as `forge_algos.PackedBatch` or `PackedGroups`."""

    packed: forge_packing.PackedBatch | forge_packing.PackedGroups = attrs.field(repr=False)
    image_inputs: Callable[[], ImageInputs] = attrs.field(repr=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packed, name)


def image_row(
    row: forge_packing.PackedBatch | forge_packing.PackedGroups,
    store: forge_data.TokenStore,
    indices: Sequence[int] | Ints,
    inputs: forge_data.ImageInputs,
) -> Any:
    """Return a row of a store's samples, with their images where one has some."""
    samples = [store[int(i)] for i in indices]
    if not any(sample.images for sample in samples):
        return row

    def read() -> ImageInputs:
        return list(_each.map(inputs, samples, [store.source(int(i)) for i in indices]))

    return ImageRow(packed=row, image_inputs=read)


def read_ahead(rows: Sequence[Any]) -> list[Any]:
    """Return the micro-batches of a step, whose images are read ahead.

    Those of each are read while the one before is computed, and the first ones' from now on. Those of no more than two rows are
    held at once: of the last one that was asked for, which a reference is given too, and of the next.
    """
    with_images = [row for row in map(_row_of, rows) if row is not None]
    ahead = iter(with_images)
    started: list[Future[ImageInputs]] = []

    def start() -> None:
        if (row := next(ahead, None)) is not None:
            started.append(_next.submit(row.image_inputs))

    def read(row: ImageRow, number: int) -> ImageInputs:
        if number == next(iter(last), None):  # a second look at the row
            return last[number]
        last.clear()
        if number != taken[0] or not started:  # rows from the first again
            last[number] = row.image_inputs()
            return last[number]
        taken[0] += 1
        last[number] = started.pop().result()
        start()
        return last[number]

    taken, last = [0], dict[int, ImageInputs]()
    start()
    numbers = {id(row): number for number, row in enumerate(with_images)}

    def ahead_of(batch: Any) -> Any:
        row = _row_of(batch)
        if row is None:
            return batch
        row = attrs.evolve(row, image_inputs=partial(read, row, numbers[id(row)]))
        return row if isinstance(batch, ImageRow) else attrs.evolve(batch, groups=row)

    return [*map(ahead_of, rows)]


def _row_of(batch: Any) -> ImageRow | None:
    """Return the row with images that a micro-batch is or has; None where it has none."""
    row = getattr(batch, "groups", batch)
    return row if isinstance(row, ImageRow) else None
