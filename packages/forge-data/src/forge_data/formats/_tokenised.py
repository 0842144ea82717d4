"""Row of token ids and labels → `Tokens`, checked before anything trains on them."""

from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._errors import DataError
from forge_data._example import IGNORED
from forge_data._values import describe
from forge_data.formats._format import Fields, Format
from forge_data.formats._samples import Tokens
from forge_data.formats._weights import weight_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def checked_tokens(place: str, fields: Fields) -> Tokens:
    """Read `input_ids`, `labels` and `weights` of a row; a label must be -100 or its id.

    Raises:
        DataError: values that are not token ids, lengths that differ, padding, labels that are shifted or of something else,
            weights that are none.
    """
    ids, labels = _numbers(place, "input_ids", fields["input_ids"]), _numbers(place, "labels", fields["labels"])
    if len(ids) != len(labels):
        raise DataError(
            f"{place}: input_ids holds {len(ids)} tokens and labels {len(labels)}; they must be as long as each other"
        )
    if "len" in fields and fields["len"] != len(ids):
        raise DataError(f"{place}: field len is {describe(fields['len'])}, but input_ids holds {len(ids)} tokens")
    _check_attention(place, fields.get("attention_mask"), len(ids))
    _check_range(place, ids, 2**31)
    trained = labels != IGNORED
    _check_count(place, fields.get("num_loss_counted_tokens"), trained)
    wrong = np.flatnonzero(trained & (labels != ids))
    if len(wrong):
        raise DataError(_mislabelled(place, ids, labels, int(wrong[0])))
    weights = _checked_weights(place, fields.get("weights"), trained)
    if weights is None:
        return Tokens(place, ids.astype(np.int32), trained)
    trained &= weights > 0
    return Tokens(place, ids.astype(np.int32), trained, weights=np.where(trained, weights, np.float32(0)))


def check_vocabulary(tokens: Tokens, vocabulary: int | None) -> None:
    """Refuse token ids outside [0, `vocabulary`); None where no tokenizer is known.

    Raises:
        DataError: naming the first.
    """
    if vocabulary is not None:
        _check_range(tokens.place, tokens.input_ids, vocabulary)


def _numbers(place: str, field: str, value: object) -> "NDArray[np.int64]":
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise DataError(
                f"{place}: field {field} is an array {value.dtype}{list(value.shape)}; it must be one row of integers"
            )
        return value.astype(np.int64)
    if not isinstance(value, list):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be a list of token ids")
    # A bool is an int to Python, and a float that looks whole may have lost digits on its way.
    if set(map(type, value)) <= {int} and (not value or (min(value) >= -(2**31) and max(value) < 2**31)):
        return np.array(value, dtype=np.int64)
    at, item = next((at, item) for at, item in enumerate(value) if type(item) is not int or not -(2**31) <= item < 2**31)
    raise DataError(f"{place}: field {field}[{at}] is {describe(item)}; token ids are whole numbers")


def _check_attention(place: str, mask: object, length: int) -> None:
    if mask is None:
        return
    items = mask.tolist() if isinstance(mask, np.ndarray) else mask
    if not isinstance(items, list):
        raise DataError(f"{place}: field attention_mask is {describe(mask)}; it must be a list of 0 and 1, or not there")
    if len(items) != length:
        raise DataError(f"{place}: field attention_mask is a list of {len(items)}, but input_ids holds {length} tokens")
    for index, item in enumerate(items):
        if type(item) is not int or item not in (0, 1):
            raise DataError(f"{place}: field attention_mask[{index}] is {describe(item)}; it must be 0 or 1")
    if 0 in items:
        raise DataError(f"{place}: attention_mask holds zeros, so the row is padded; take the padding out of the row")


def _checked_weights(place: str, given: object, trained: "NDArray[np.bool_]") -> "NDArray[np.float32] | None":
    """Read the weights of the tokens; None where there are none."""
    if given is None:
        return None
    items = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(items, list):
        raise DataError(f"{place}: field weights is {describe(given)}; it must be a list of numbers, one a token, or not there")
    if len(items) != len(trained):
        raise DataError(f"{place}: field weights is a list of {len(items)}, but input_ids holds {len(trained)} tokens")
    return np.array([weight_of(place, f"weights[{at}]", item) for at, item in enumerate(items)], dtype=np.float32)


def _check_count(place: str, given: object, trained: "NDArray[np.bool_]") -> None:
    """Check mini-trainer's count of learned tokens, which may or may not count a first label."""
    if given is not None and given not in (int(trained.sum()), int(trained[1:].sum())):
        raise DataError(
            f"{place}: field num_loss_counted_tokens is {describe(given)}, but {int(trained.sum())} labels are not {IGNORED}; "
            "mend it or take it out"
        )


def _check_range(place: str, ids: "NDArray[np.integer[Any]]", vocabulary: int) -> None:
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(outside):
        at = int(outside[0])
        raise DataError(
            f"{place}: field input_ids[{at}] is {ids[at]}, outside the vocabulary 0 to {vocabulary - 1}; "
            "was the row made with another tokenizer?"
        )


def _mislabelled(place: str, ids: "NDArray[np.int64]", labels: "NDArray[np.int64]", at: int) -> str:
    what = f"{place}: field labels[{at}] is {labels[at]} where input_ids[{at}] is {ids[at]}"
    for shift, which in ((1, "next"), (-1, "previous")):
        moved = np.roll(ids, -shift)
        inner = slice(None, -1) if shift == 1 else slice(1, None)
        learned = labels[inner] != IGNORED
        if learned.any() and np.array_equal(labels[inner][learned], moved[inner][learned]):
            return (
                f"{what}: the labels are shifted, each is the {which} token; give labels[t] == input_ids[t] or -100, "
                "for the loss does the shifting"
            )
    return f"{what}; a label must be the id at its own position, or {IGNORED} where nothing is learned"


TOKENISED = Format(
    needs="input_ids, labels",
    matches=lambda row: "input_ids" in row and "labels" in row,
    convert=checked_tokens,
    field_of=lambda _row, _index, _part, _answer: "input_ids",
)
"""Token ids and labels."""
