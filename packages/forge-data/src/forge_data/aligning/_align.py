"""Rows as two tokenizers have them → the other's tokens of each sample, and common spans.

What is learned of a row is runs of tokens, an answer each. The runs of both sides are compared in their order, byte by byte
from their first character that is no white space: a span ends wherever a token of either ends at the same byte. Where texts
differ, what they begin with and what they end with is aligned. Behind the text the special tokens that end a turn are a span
too, whatever they are called, with the blanks before them.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_data._example import IGNORED
from forge_data.aligning._spelling import Spelling

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLANKS = b" \t\r\n"

Sample = tuple["NDArray[np.int32]", "NDArray[np.int32]"]
"""Ids and labels, int32[S] each."""


class Aligned(NamedTuple):
    """What another tokenizer has of one sample, and the spans that both cut alike."""

    ids: "NDArray[np.int32]"
    """int32[U], tokens of one text or of several, one after another."""
    starts: "NDArray[np.uint8]"
    """uint8[U], 1 where a text begins."""
    spans: "NDArray[np.int32]"
    """int32[G, 4]: tokens [a, b) of the sample, and [c, d) of `ids`, of the same text."""
    ends: list[tuple[int, int]]
    """Token of either that ends a turn, for each turn that both end with one."""
    begin: int = 0
    """Where in `ids` the last run begins."""


class _Run(NamedTuple):
    sample: int
    start: int
    stop: int


def align(ours: Sequence[Sample], theirs: Sequence[Sample], own: Spelling, other: Spelling) -> list[Aligned]:
    """Align the samples of one row with those that another tokenizer has of it.

    A row is several samples where its turns are learned apart. The other tokenizer may have it as one sample all the same, or
    the other way round: each of our samples gets the texts that its runs stand in, up to the last of them.

    Returns:
        list: one for each of our samples; without spans where both have another number of runs.
    """
    runs, others = (list(_runs(samples)) for samples in (ours, theirs))
    if len(runs) != len(others):
        return [_NOTHING for _ in ours]
    found = []
    for sample in range(len(ours)):
        pairs = [pair for pair in zip(runs, others, strict=True) if pair[0].sample == sample]
        stops = {theirs_run.sample: theirs_run.stop for _, theirs_run in pairs}
        begins = dict(zip(stops, np.cumsum([0, *stops.values()]).tolist(), strict=False))
        spans, ends = [], []
        for run, their_run in pairs:
            text = theirs[their_run.sample][0]
            cut, end = _spans(ours[sample][0], text, run, their_run, own, other)
            # The first token of a text is predicted by nothing.
            cut = cut[(cut[:, 0] > 0) & (cut[:, 2] > 0)]
            spans.append(cut + np.array([0, 0, 1, 1]) * begins[their_run.sample])
            ends += end
        ids = [theirs[at][0][:stop] for at, stop in stops.items()]
        whole = np.concatenate(spans) if spans else np.zeros((0, 4), np.int64)
        if not len(whole):
            found.append(_NOTHING)
            continue
        starts = np.zeros(sum(map(len, ids)), np.uint8)
        starts[list(begins.values())] = 1
        last = pairs[-1][1]
        begin = begins[last.sample] + last.start
        found.append(Aligned(np.concatenate(ids).astype(np.int32), starts, whole.astype(np.int32), ends, begin))
    return found


_NOTHING = Aligned(np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros((0, 4), np.int32), [])


def _runs(samples: Sequence[Sample]) -> Iterator[_Run]:
    """Yield the runs of learned tokens of several samples."""
    for number, (_, labels) in enumerate(samples):
        learned = np.concatenate(([False], np.asarray(labels) != IGNORED, [False]))
        for start, stop in np.flatnonzero(np.diff(learned)).reshape(-1, 2).tolist():
            yield _Run(number, start, stop)


class Side(NamedTuple):
    """A run of learned tokens, without what ends its turn."""

    text: bytes
    """Its bytes, without blanks at both ends."""
    bounds: "NDArray[np.int64]"
    """int64[n+1], 0 and where each of the n tokens of the text ends in it."""
    closing: int | None
    """Place of the special token that ends the turn, behind those n."""


def _spans(
    ids: "NDArray[np.int32]", other_ids: "NDArray[np.int32]", run: _Run, other_run: _Run, own: Spelling, other: Spelling
) -> "tuple[NDArray[np.int64], list[tuple[int, int]]]":
    """Align two runs: int64[G, 4], and the two tokens that end them, if special ones do."""
    parts = ids[run.start : run.stop], other_ids[other_run.start : other_run.stop]
    a, b = (side_of(part, spelling) for part, spelling in zip(parts, (own, other), strict=True))
    found, both_end = common_spans(a, b)
    closing: list[tuple[int, int]] = []
    if both_end and a.closing is not None and b.closing is not None:
        closing.append((int(parts[0][a.closing]), int(parts[1][b.closing])))
    return found + np.repeat([run.start, other_run.start], 2), closing


def common_spans(a: Side, b: Side) -> "tuple[NDArray[np.int64], bool]":
    """Align the tokens of two runs: int64[G, 4], and whether both texts end alike."""
    alike = _common_prefix(a.text, b.text)
    cuts = np.intersect1d(a.bounds[a.bounds <= alike], b.bounds[b.bounds <= alike])
    found = [_between(a, b, cuts, cuts)]
    both_end = alike == len(a.text) == len(b.text)
    if not both_end:
        # Where one template writes more (a block of reasoning before an answer) the text behind that is the same again.
        ends_alike = _common_prefix(a.text[alike:][::-1], b.text[alike:][::-1])
        sizes = len(a.text), len(b.text)
        ours, theirs = a.bounds - sizes[0], b.bounds - sizes[1]
        cuts = np.intersect1d(ours[ours >= -ends_alike], theirs[theirs >= -ends_alike])
        found.append(_between(a, b, cuts + sizes[0], cuts + sizes[1]))
        both_end = ends_alike > 0
    if both_end and a.closing is not None and b.closing is not None:
        # With the blanks before them.
        found.append(np.array([[len(a.bounds) - 1, a.closing + 1, len(b.bounds) - 1, b.closing + 1]]))
    return np.concatenate(found), both_end


def side_of(ids: "NDArray[np.int32]", spelling: Spelling, special: "Sequence[bool] | None" = None) -> Side:
    """Read a run of tokens; `special` are those that may end its turn, by default all such."""
    spelled = spelling.of(ids)
    special = [int(number) in spelling.special for number in ids] if special is None else special
    size = len(spelled)
    while size and (special[size - 1] or not spelled[size - 1].strip(_BLANKS)):
        size -= 1
    closing = next((place for place in range(size, len(spelled)) if special[place]), None)
    whole = b"".join(spelled[:size])
    lead = len(whole) - len(whole.lstrip(_BLANKS))
    text = whole.strip(_BLANKS)
    ends = np.cumsum([len(each) for each in spelled[:size]], dtype=np.int64) - lead
    return Side(text, np.append(0, ends).clip(0, len(text)).astype(np.int64), closing)


def _between(a: Side, b: Side, cuts: "NDArray[np.int64]", other_cuts: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """Return the tokens between places of both texts that follow each other: int64[G, 4]."""
    # A token that spells nothing belongs to the span of the next one that does.
    at = [np.searchsorted(side.bounds, places) for side, places in ((a, cuts), (b, other_cuts))]
    return np.stack([at[0][:-1], at[0][1:], at[1][:-1], at[1][1:]], axis=1).astype(np.int64)


def _common_prefix(one: bytes, other: bytes) -> int:
    """Count the bytes with which both begin."""
    both: list[Any] = [np.frombuffer(each, np.uint8)[: min(len(one), len(other))] for each in (one, other)]
    differ = np.flatnonzero(both[0] != both[1])
    return int(differ[0]) if len(differ) else len(both[0])
