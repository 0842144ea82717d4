"""Packed row of completions → the same with their prompts' images."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos.batches._groups import PackedGroups
from forge_algos.batches._images import ImageInputs, continued
from forge_algos.online.sampling._image_rows import ImagesOf

Images = Mapping[int, ImageInputs]
"""Row of a prompt with images → what a processor makes of them. It may be made when it is asked for."""
JoinImages = Callable[[Sequence[ImageInputs]], Sequence[ImageInputs]]
"""Makes the arrays of images that share a forward alike in size, as the processor does those of a batch."""


def of_prompts(images: Images | None, rows: Sequence[int] | NDArray[np.int64]) -> list[ImagesOf] | None:
    """Return what makes the images of each prompt, by its row; None where no prompt has any."""
    if images is None:
        return None
    return [partial(images.__getitem__, row) if row in images else None for row in map(int, rows)]


@attrs.frozen(kw_only=True, eq=False)
class RowWithImages:
    """A `PackedGroups` with images."""

    packed: PackedGroups = attrs.field(repr=False)
    image_inputs: Callable[[], Sequence[ImageInputs]] = attrs.field(repr=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packed, name)


def with_prompt_images(
    row: PackedGroups,
    groups: NDArray[np.int64],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    images: Sequence[ImagesOf],
    join: JoinImages = list,
) -> PackedGroups:
    """Return a row with the images of its prompts, where one has some.

    Args:
        row: of completions, none of which shares its prompt.
        groups: int64[B], the prompt of each completion.
        prompts: int[S] each, of all groups.
        completions: int[S] each, of the row.
        images: of each prompt.
        join: makes the arrays of the row's images alike in size.
    """
    if all(images[group] is None for group in groups):
        return row

    def read() -> Sequence[ImageInputs]:
        made: dict[int, ImageInputs] = {}
        found: list[ImageInputs] = []
        for group, completion in zip(groups.tolist(), completions, strict=True):
            if group not in made:
                make = images[group]
                made[group] = {} if make is None else make()
            found.append(continued(made[group], len(prompts[group]), len(prompts[group]) + len(completion)))
        return join(found)

    wrapped: Any = RowWithImages(packed=row, image_inputs=read)
    return wrapped
