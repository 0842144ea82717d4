"""Prompts with images → the arguments of a batch, and which prompts may stand in one."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import PackedBatchError, RolloutError
from forge_algos.batches._media import MediaInputs, go_by_lines
from forge_algos.heads._media import MediaDocument, longer, words_of
from forge_algos.isolation._compare import REFUSALS, Compare, Decide
from forge_algos.isolation._isolation import made_up_lengths

MediaOf = Callable[[], MediaInputs] | None
"""Makes what a processor does of a prompt's images, when its turn comes; None for a prompt without images."""
Beside = Literal["any", "same", "none"]
"""Which prompts may stand beside one with images in a batch: any, the same one again, or none."""


@attrs.frozen(kw_only=True, eq=False)
class SampledMedia:
    """What a sampler must know of the images of a run's prompts."""

    documents: Sequence[MediaDocument]
    """One or two with images, the same on all ranks, on which batches are tried."""
    token_ids: frozenset[int]
    """Tokens that stand for parts of images, videos or sounds: none is ever drawn, since a completion has none of those."""
    joins: bool = True
    """Whether the arrays of unlike images are given to a model one behind another."""
    join: Callable[[Sequence[MediaInputs]], Sequence[MediaInputs]] = list
    """Makes the arrays of a batch's images alike in size."""
    join_more: Callable[[Sequence[MediaInputs]], Sequence[MediaInputs]] = list
    """The same, larger than the largest: the documents that are tried may be as large as each other."""


class Line(NamedTuple):
    """A prompt of a batch."""

    ids: Any
    """int[S]."""
    media: MediaInputs = MappingProxyType({})


def checked_media(media: Sequence[MediaOf] | None, prompts: int, known: SampledMedia | None) -> Sequence[MediaOf]:
    """Return the images of each prompt, None for none."""
    if media is None:
        return [None] * prompts
    if known is None or len(media) != prompts:
        raise RolloutError(
            f"media: of {len(media)} prompts, where there are {prompts}; each has some or None, and the sampler is made with "
            "`media`"
        )
    return media


def lines_of(numbers: Sequence[int], prompts: Sequence[NDArray[Any]], media: Sequence[MediaOf]) -> list[Line]:
    """Return the prompts of a batch by their numbers, the images of each made once."""
    made: dict[int, MediaInputs] = {}
    for number in numbers:
        if number not in made:
            make = media[number]
            made[number] = {} if make is None else make()
    return [Line(prompts[number], made[number]) for number in numbers]


def tried_lines(model: nn.Module, media: SampledMedia) -> tuple[Line, Line]:
    """Return two prompts with images, of unlike lengths, longer than what layers see at once."""
    first, second = ([*media.documents] * 2)[:2]
    least, more = made_up_lengths(model)
    longest = max(len(first.input_ids), len(second.input_ids), least)
    pair = (longer(each, wanted - len(each.input_ids)) for each, wanted in ((first, longest + 3), (second, longest + more)))
    one, other = (Line(np.asarray(each.input_ids), each.inputs) for each in pair)
    return one, other


def text_line(document: MediaDocument) -> Line:
    """Return the words of a document as a prompt without images."""
    return Line(np.asarray(document.input_ids)[words_of(document)])


def may_stand_beside(
    model: nn.Module,
    media: SampledMedia,
    following: Callable[[Sequence[Line]], torch.Tensor],
    decide: Decide = int,
) -> Beside:
    """Try which prompts with images may stand in a batch.

    Each must be followed by what follows it alone.

    Args:
        model: bare or wrapped.
        media: with the documents that are tried.
        following: lines → logits float[N, B, V] behind them.
        decide: by which ranks answer alike.
    """
    one, other = tried_lines(model, media)
    if go_by_lines(model, torch.as_tensor(np.asarray(one.ids, np.int64)), one.media):
        return "none"

    def holds(*lines: Line, join: Callable[[Sequence[MediaInputs]], Sequence[MediaInputs]] = list) -> bool:
        beside = [Line(line.ids, made) for line, made in zip(lines, join([line.media for line in lines]), strict=True)]
        try:
            with Compare(model, decide) as compare:
                ours, alone = following(beside), [following([line])[:, 0] for line in lines]
                return all(equal_each(compare, ours[:, at], each) for at, each in enumerate(alone))
        except torch.OutOfMemoryError:
            raise
        except (*REFUSALS, PackedBatchError):
            return False

    if media.joins and holds(one, text_line(media.documents[0]), other, join=media.join_more):
        return "any"
    return "same" if holds(one, one) else "none"


def equal_each(compare: Compare, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare logits [N, V] within rounding, each step's by its own largest."""
    steps = zip(ours.split(1), theirs.split(1), strict=True)
    return all(compare.equal(lambda one=one: one, lambda other=other: other) for one, other in steps)
