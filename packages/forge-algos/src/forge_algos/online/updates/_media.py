"""Packed row of completions → the same with their prompts' images."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos.batches._groups import PackedGroups
from forge_algos.batches._media import MediaInputs, continued
from forge_algos.online.sampling._media_rows import MediaOf

MediaRead = Mapping[int, MediaInputs]
"""Row of a prompt with images → what a processor makes of them. It may be made when it is asked for."""
JoinMedia = Callable[[Sequence[MediaInputs]], Sequence[MediaInputs]]
"""Makes the arrays of images that share a forward alike in size, as the processor does those of a batch."""


def of_prompts(media: MediaRead | None, rows: Sequence[int] | NDArray[np.int64]) -> list[MediaOf] | None:
    """Return what makes the images of each prompt, by its row; None where no prompt has any."""
    if media is None:
        return None
    return [partial(media.__getitem__, row) if row in media else None for row in map(int, rows)]


@attrs.frozen(kw_only=True, eq=False)
class RowWithMedia:
    """A `PackedGroups` with images."""

    packed: PackedGroups = attrs.field(repr=False)
    media_inputs: Callable[[], Sequence[MediaInputs]] = attrs.field(repr=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packed, name)


def with_prompt_media(
    row: PackedGroups,
    groups: NDArray[np.int64],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    media: Sequence[MediaOf],
    join: JoinMedia = list,
) -> PackedGroups:
    """Return a row with the images of its prompts, where one has some.

    Args:
        row: of completions, none of which shares its prompt.
        groups: int64[B], the prompt of each completion.
        prompts: int[S] each, of all groups.
        completions: int[S] each, of the row.
        media: of each prompt.
        join: makes the arrays of the row's images alike in size.
    """
    if all(media[group] is None for group in groups):
        return row

    def read() -> Sequence[MediaInputs]:
        made: dict[int, MediaInputs] = {}
        found: list[MediaInputs] = []
        for group, completion in zip(groups.tolist(), completions, strict=True):
            if group not in made:
                make = media[group]
                made[group] = {} if make is None else make()
            found.append(continued(made[group], len(prompts[group]), len(prompts[group]) + len(completion)))
        return join(found)

    wrapped: Any = RowWithMedia(packed=row, media_inputs=read)
    return wrapped
