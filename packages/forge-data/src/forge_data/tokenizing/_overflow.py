"""Example → the pieces that fit into `max_seq_len`, and the tokens that are lost, by reason."""

from collections import Counter
from typing import NamedTuple

import attrs
import numpy as np

from forge_data._accounting import (
    NO_TRAINED_TOKEN,
    NOTHING_WITHIN,
    SAME_ANSWERS,
    SAME_WITHIN,
    TOO_LONG,
    TRUNCATED,
    UNTRAINED_PIECE,
)
from forge_data._errors import BadPairError, DataError
from forge_data._example import TokenizedExample
from forge_data._options import Options
from forge_data.formats._samples import Encoded


class Fitted(NamedTuple):
    """Samples made of the examples of one row."""

    kept: tuple[TokenizedExample, ...]
    """Samples in order; none where the row is dropped."""

    reason: str | None
    """Why the row is dropped; None where it is kept."""

    lost: dict[str, int]
    """Tokens that are in no sample, by reason."""


def fit(place: str, encoded: Encoded, options: Options) -> Fitted:
    """Cut the examples of one row to length, as `on_overflow` says.

    A row of exactly `max_seq_len` tokens fits. Both sides of a preference stay or both are dropped, since one side alone
    teaches nothing; the samples of a conversation's turns stay or go one by one.

    Raises:
        BadPairError: two sides of the same tokens, before or after they were cut.
        DataError: a row that is too long under `on_overflow="error"`, or a preference under "split".
    """
    if encoded.pair or len(encoded.examples) == 1:
        return _fit_together(place, encoded.examples, options)
    fitted = [_fit_together(place, (example,), options) for example in encoded.examples]
    kept = tuple(piece for each in fitted for piece in each.kept)
    lost: Counter[str] = Counter()
    for each in fitted:
        lost.update(each.lost)
    reasons = [each.reason for each in fitted if each.reason not in (None, NO_TRAINED_TOKEN)]
    return Fitted(kept, None if kept else next(iter(reasons), NO_TRAINED_TOKEN), dict(lost))


def _fit_together(place: str, examples: tuple[TokenizedExample, ...], options: Options) -> Fitted:
    """Cut one example, or the two of a preference."""
    tokens = sum(map(len, examples))
    if _same(examples):
        raise BadPairError(
            f"{place}: field rejected is the same as chosen, token for token; take the row out, or mend it", reason=SAME_ANSWERS
        )
    if not all(example.loss_count for example in examples):
        return Fitted((), NO_TRAINED_TOKEN, {NO_TRAINED_TOKEN: tokens})
    limit = options.max_seq_len
    longest = max(map(len, examples))
    if limit is None or longest <= limit:
        return Fitted(examples, None, {})
    match options.on_overflow:
        case "drop":
            return Fitted((), TOO_LONG, {TOO_LONG: tokens})
        case "truncate":
            return _truncated(place, examples, limit, tokens)
        case "split":
            return _split(place, examples, limit, tokens)
        case _:
            raise DataError(
                f"{place}: {longest} tokens, and `max_seq_len` is {limit}; raise it, shorten the row, or say what becomes "
                "of such rows with `on_overflow`: drop, truncate or split"
            )


def _same(examples: tuple[TokenizedExample, ...]) -> bool:
    return len(examples) > 1 and np.array_equal(examples[0].input_ids, examples[1].input_ids)


def _truncated(place: str, examples: tuple[TokenizedExample, ...], limit: int, tokens: int) -> Fitted:
    kept = tuple(piece(example, 0, _before_cut(example, limit)) if len(example) > limit else example for example in examples)
    if not all(example.loss_count for example in kept):
        return Fitted((), NOTHING_WITHIN, {NOTHING_WITHIN: tokens})
    if _same(kept):
        raise BadPairError(
            f"{place}: field rejected is the same as chosen in its first {limit} tokens, and `max_seq_len` cuts off the "
            "others; raise it, or leave such rows out",
            reason=SAME_WITHIN,
        )
    return Fitted(kept, None, {TRUNCATED: tokens - sum(map(len, kept))})


def _split(place: str, examples: tuple[TokenizedExample, ...], limit: int, tokens: int) -> Fitted:
    if len(examples) > 1:
        raise DataError(
            f"{place}: a preference of which one side is longer than `max_seq_len` ({limit}) cannot be split; "
            "set `on_overflow` to drop or truncate"
        )
    (whole,) = examples
    if whole.media:
        raise DataError(
            f"{place}: {len(whole)} tokens, `max_seq_len` is {limit}, and a row with images cannot be split; raise it, or set "
            "`on_overflow` to drop or truncate"
        )
    pieces = [piece(whole, start, min(start + limit, len(whole))) for start in range(0, len(whole), limit)]
    kept = tuple(each for each in pieces if each.loss_count)
    if not kept:
        return Fitted((), NOTHING_WITHIN, {NOTHING_WITHIN: tokens})
    lost = tokens - sum(map(len, kept))
    return Fitted(kept, None, {UNTRAINED_PIECE: lost} if lost else {})


def _before_cut(example: TokenizedExample, limit: int) -> int:
    """Return how many first tokens are kept: up to an image that would be cut."""
    return next((medium.start for medium in example.media if medium.start < limit < medium.stop), limit)


def piece(example: TokenizedExample, start: int, stop: int) -> TokenizedExample:
    """Cut out the tokens [start, stop) of an example, with the segments that they are in."""
    spans = example.segments
    inside = (spans[:, 1] > start) & (spans[:, 0] < stop)
    cut = (np.clip(spans[inside], start, stop) - start).astype(np.int32)
    roles = tuple(role for role, there in zip(example.roles, inside, strict=True) if there)
    weights = None if example.weights is None else example.weights[start:stop]
    media = tuple(
        attrs.evolve(medium, start=medium.start - start, stop=medium.stop - start)
        for medium in example.media
        if start <= medium.start and medium.stop <= stop
    )
    return TokenizedExample(example.input_ids[start:stop], example.labels[start:stop], cut, roles, weights, media)
