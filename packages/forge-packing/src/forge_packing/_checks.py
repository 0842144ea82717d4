"""Checks of arguments: integers, bools and int64 arrays, or a PackingError."""

import numpy as np
import numpy.typing as npt

from forge_packing._errors import PackingError

Int64Array = npt.NDArray[np.int64]

MAX_TOKENS = 2**31 - 1
"""The most tokens of a micro-batch: PackedBatch.cu_seqlens is int32, as attention kernels expect."""

MAX_RANKS = 2**20
"""The most ranks: more is a mistake, and would fill the memory with empty micro-batches."""


def checked_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Return an integer (no bool) from minimum to maximum as an int; PackingError for others."""
    expected = f"an integer of at least {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise PackingError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        raise PackingError(f"{name} must be {expected}, got {number}")
    return number


def checked_bool(name: str, value: object) -> bool:
    """Return the value as a bool. PackingError for anything else, as "false" would be true."""
    if not isinstance(value, (bool, np.bool_)):
        raise PackingError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return bool(value)


def integer_array(name: str, values: npt.ArrayLike) -> Int64Array:
    """Return a flat sequence of integers as a new int64[N]; PackingError for anything else."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # ragged nesting
        raise PackingError(f"{name} must be a flat sequence of integers: {error}") from error
    if array.ndim == 0:
        raise PackingError(f"{name} must be a flat sequence of integers, got {type(values).__name__}")
    if array.ndim != 1:
        raise PackingError(f"{name} must be a flat sequence of integers, got an array of shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype == object:  # as the columns of tables are, whatever they hold
        array = np.asarray(array.tolist())
    if array.dtype == object and all(isinstance(value, int) for value in array):
        beyond = next(at for at, value in enumerate(array) if not -(2**63) <= value < 2**63)
        raise PackingError(f"{name} must fit into int64, found {array[beyond]} at index {beyond}")
    if array.dtype.kind not in "iu":
        index, found = _first_non_integer(array)
        raise PackingError(f"{name} must be integers, found {found!r} at index {index} (dtype {array.dtype})")
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        raise PackingError(f"{name} must fit into int64, found {int(array.max())} at index {int(array.argmax())}")
    return array.astype(np.int64, copy=True)


def sample_lengths(lengths: npt.ArrayLike, max_tokens: int, budget_name: str) -> Int64Array:
    """Return lengths as int64[N], each from 1 to max_tokens.

    Raises PackingError for anything else, empty input included; it names the limit `budget_name`.
    """
    array = integer_array("lengths", lengths)
    if array.size == 0:
        raise PackingError("lengths is empty: there is no sample to plan. Check that the data has rows left after filtering")
    bad = np.flatnonzero(array < 1)
    if bad.size:
        raise PackingError(
            f"lengths must be at least 1 token, found {array[bad[0]]} at index {bad[0]}"
            f"{_and_others(bad.size)}. Leave out empty samples before planning"
        )
    bad = np.flatnonzero(array > max_tokens)
    if bad.size:
        raise PackingError(
            f"sample {bad[0]} has {array[bad[0]]} tokens, more than {budget_name}={max_tokens}{_and_others(bad.size)}. "
            f"Set {budget_name} to at least {array.max()} (the longest sample), or leave out longer samples before planning"
        )
    return array


def sample_loss_counts(loss_counts: npt.ArrayLike, lengths: Int64Array) -> Int64Array:
    """Return loss counts as int64[N]; else PackingError.

    Each is from 0 to one less than the sample's length, since no token precedes its first. A sample of one token may count 1,
    where its loss is of the whole sample and not of tokens.
    """
    array = integer_array("loss_counts", loss_counts)
    if array.shape != lengths.shape:
        raise PackingError(f"loss_counts must have one entry a sample: got {array.size} for {lengths.size} lengths")
    bad = np.flatnonzero((array < 0) | (array > np.maximum(lengths - 1, 1)))
    if bad.size:
        raise PackingError(
            f"loss_counts must lie between 0 and one less than the sample's length, found {array[bad[0]]} at index {bad[0]}, "
            f"a sample of {lengths[bad[0]]} tokens{_and_others(bad.size)}. "
            "Count the labels after the first that are not -100: nothing precedes the first token, so it is never learned"
        )
    return array


def _first_non_integer(array: np.ndarray) -> tuple[int, object]:
    values = array.tolist()
    return next((at, value) for at, value in enumerate(values) if isinstance(value, bool) or not isinstance(value, int))


def _and_others(count: int) -> str:
    return "" if count == 1 else f" (and {count - 1} more like it)"
