"""All samples of a data set → findings on repetitions, evaluation rows and outliers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._values import counted
from forge_data.findings._finding import Finding
from forge_data.findings._rules import found
from forge_data.linting._sample_table import SampleTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

# An outlier is this many times further from the median than samples usually are, ...
_SPREADS = 6.0
_LEAST_SPREAD = 0.35
# ... and its learned, or not learned, share is below a part of the usual one, among enough samples to know that.
_PART = 20
_LEAST_SAMPLES = 20
# Few samples, two or one in so many, have an extreme length: so many times the tokens of all others, and no fewer than this.
_ONE_IN = 50
_TIMES = 10
_LONG = 8192


def duplicates(table: SampleTable) -> Iterator[Finding]:
    """Find units whose ids are those of an earlier one, which repeat or contradict it."""
    earliest = _earliest(table.digests)
    same = _earliest(table.digests, table.marks)
    for unit in np.flatnonzero(earliest != np.arange(len(earliest))):
        repeats = same[unit] != unit
        before = same[unit] if repeats else earliest[unit]
        where, first = (table.where(int(table.firsts[at])) for at in (unit, before))
        # The pieces of one long row may well be the same.
        if where.place != first.place:
            what = f"its tokens are those of {first.place}"
            yield (
                found("duplicate_row", where, "", what)
                if repeats
                else found("conflicting_labels", where, "", f"{what}, which has another label or margin")
            )


def overlap(train: SampleTable, held_out: SampleTable) -> Iterator[Finding]:
    """Find units of the evaluation that are trained on."""
    trained = len(train.digests)
    earliest = _earliest(np.concatenate((train.digests, held_out.digests)))[trained:]
    for unit in np.flatnonzero(earliest < trained):
        where, trained_row = held_out.where(int(held_out.firsts[unit])), train.where(int(train.firsts[earliest[unit]]))
        yield found("train_eval_overlap", where, "", f"its tokens are those of {trained_row.place}, which is trained on")


def _earliest(digests: "NDArray[Any]", marks: "NDArray[np.int64] | None" = None) -> "NDArray[np.int64]":
    """Return int64[U]: the first place of each digest, or of each digest with its mark."""
    if marks is None:
        marks = np.zeros(len(digests), dtype=np.int64)
    order = np.lexsort((marks, digests["low"], digests["high"]))  # stable, so the earliest of a group comes first
    ordered, marked = digests[order], marks[order]
    equal = (ordered[1:] == ordered[:-1]) & (marked[1:] == marked[:-1])
    follows = np.concatenate((np.zeros(min(1, len(order)), dtype=np.bool_), equal))
    heads = np.maximum.accumulate(np.where(follows, 0, np.arange(len(order))))
    earliest = np.empty_like(order)
    earliest[order] = order[heads]
    return earliest


def outliers(table: SampleTable) -> Iterator[Finding]:
    """Find samples of which far more or far less is learned than of the others.

    Tokens of images are as many as the picture is large, and say nothing of what is learned of the text.
    """
    if len(table.lengths) < _LEAST_SAMPLES:
        return
    learned = table.loss_counts.astype(np.float64)
    # The first label of a sample never counts, so a sample of which all is learned has no other token.
    rest = table.text_lengths - 1 - learned
    odds = np.log((learned + 0.5) / (rest + 0.5))
    middle = float(np.median(odds))
    spread = max(1.4826 * float(np.median(np.abs(odds - middle))), _LEAST_SPREAD)
    share = learned / np.maximum(table.text_lengths - 1, 1)
    usual = float(np.median(share))
    far = np.abs(odds - middle) > _SPREADS * spread
    unusual = (share * _PART < usual) | ((1 - share) * _PART < 1 - usual)
    for sample in np.flatnonzero(far & unusual):
        what = (
            f"{share[sample]:.2%} of {counted(int(table.text_lengths[sample]), 'tokens')} are learned; half of the samples lie "
            f"{'above' if share[sample] < usual else 'below'} {usual:.2%}"
        )
        yield found("label_fraction", table.where(int(sample)), "", what)


def extreme_lengths(table: SampleTable) -> Iterator[Finding]:
    """Find few samples that are many times as long as all others.

    Documents, of which all is learned, may have any length: they are cut into blocks.
    """
    lengths = table.lengths
    if len(lengths) < 2 or bool((table.loss_counts >= lengths - 1).all()):
        return
    order = np.argsort(-lengths, kind="stable")
    after = lengths[order[1 : 1 + max(2, len(lengths) // _ONE_IN)]]
    gaps = np.flatnonzero(after * _TIMES <= lengths[order[0]])
    if not gaps.size or lengths[order[0]] < _LONG:
        return
    usual, places = int(after[gaps[0]]), set[str]()
    for sample in order[: gaps[0] + 1].tolist():
        where = table.where(sample)
        if where.place not in places:
            places.add(where.place)
            what = f"{int(lengths[sample]):,} tokens, and all others have {usual:,} or fewer"
            yield found("extreme_length", where, "", what)
