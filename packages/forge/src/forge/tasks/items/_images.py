"""Samples with images → rows whose forward is given what a processor makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import forge_data
    import forge_packing
    from forge.tasks.items._items import Ints

ImageInputs = Sequence[Mapping[str, Any]]
"""Of each document of a row what a processor makes of its images."""

_each = ThreadPoolExecutor(4, "images")
_next = ThreadPoolExecutor(1, "next-images")
"""Waits for `_each`, and so is another."""


@attrs.frozen(kw_only=True, eq=False)
class ImageRow:
    """A packed row with images, as `forge_algos.PackedBatch`."""

    packed: forge_packing.PackedBatch = attrs.field(repr=False)
    image_inputs: Callable[[], ImageInputs] = attrs.field(repr=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packed, name)


def image_row(
    row: forge_packing.PackedBatch, store: forge_data.TokenStore, indices: Sequence[int] | Ints, inputs: forge_data.ImageInputs
) -> Any:
    """Return a row of samples, with what the processor makes of images where one has some."""
    samples = [store[int(i)] for i in indices]
    if not any(sample.images for sample in samples):
        return row

    def read() -> ImageInputs:
        return list(_each.map(inputs, samples, [store.source(int(i)) for i in indices]))

    return ImageRow(packed=row, image_inputs=read)


def read_ahead(rows: Sequence[Any]) -> list[Any]:
    """Return the rows of a step; the images of each are read while the one before is computed.

    The first ones' are read from now on. Those of no more than two rows are held at once.
    """
    with_images = [row for row in rows if isinstance(row, ImageRow)]
    ahead = iter(with_images)
    started: list[Future[ImageInputs]] = []

    def start() -> None:
        if (row := next(ahead, None)) is not None:
            started.append(_next.submit(row.image_inputs))

    def read(row: ImageRow, number: int) -> ImageInputs:
        if number != taken[0] or not started:  # a second look at a row, or rows out of order
            return row.image_inputs()
        taken[0] += 1
        found = started.pop().result()
        start()
        return found

    taken = [0]
    start()
    numbers = {id(row): number for number, row in enumerate(with_images)}
    return [
        attrs.evolve(row, image_inputs=partial(read, row, numbers[id(row)])) if isinstance(row, ImageRow) else row
        for row in rows
    ]
