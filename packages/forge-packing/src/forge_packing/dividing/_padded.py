"""Division of steps whose micro-batches are padded: samples are lines as wide as the widest."""

import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_TOKENS, Int64Array, checked_integer, integer_array, sample_lengths
from forge_packing._errors import PackingError


def padded_sizes(widths: Int64Array, lines: Int64Array, starts: Int64Array) -> Int64Array:
    """Count the places of each micro-batch: its lines times its widest one.

    widths, lines: int64[P], micro-batch after micro-batch. starts: int64[M+1], where each begins. Returns int64[M]; 0 for an
    empty one.
    """
    sizes = np.zeros(starts.size - 1, dtype=np.int64)
    filled = np.flatnonzero(np.diff(starts))
    if filled.size:
        at = starts[filled]
        sizes[filled] = np.add.reduceat(lines, at) * np.maximum.reduceat(widths, at)
    return sizes


def divide_padded(
    widths: Int64Array, lines: Int64Array, step_starts: Int64Array, max_tokens: int, world_size: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Divide many steps into micro-batches of at most `max_tokens` places, padding counted.

    The widest samples of a step come first, as many lines to a micro-batch as fit at the width of its first; with one line a
    sample there can be no fewer micro-batches. Neighbours are about as large, and are the ranks of one pass.

    widths: int64[P], places of each line of a sample, step after step. lines: int64[P], how many each has. step_starts:
    int64[steps+1]. Returns what `divide_steps` does.
    """
    widest_first = np.argsort(fewest_bits(widths.max() - widths), kind="stable")
    step_of = np.repeat(np.arange(step_starts.size - 1), np.diff(step_starts))
    widest_first = widest_first[np.argsort(fewest_bits(step_of[widest_first]), kind="stable")]
    sorted_widths, sorted_lines = widths[widest_first], lines[widest_first]
    lines_before = np.concatenate([[0], np.cumsum(sorted_lines)])
    slot_of, passes, first_slot = np.zeros_like(widths), [], 0
    for start, stop in zip(step_starts[:-1].tolist(), step_starts[1:].tolist(), strict=True):
        slot, at = first_slot, start
        while at < stop:
            most = lines_before[at] + max_tokens // int(sorted_widths[at])
            end = min(stop, max(at + 1, int(np.searchsorted(lines_before, most, side="right")) - 1))
            slot_of[widest_first[at:end]] = slot
            slot, at = slot + 1, end
        passes.append(-(-(slot - first_slot) // world_size))
        first_slot += passes[-1] * world_size
    sizes = np.bincount(slot_of, minlength=first_slot)
    order = np.argsort(fewest_bits(slot_of), kind="stable")
    return order, np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([[0], np.cumsum(passes)])


def one_a_row(lengths: npt.ArrayLike, *, max_tokens: int) -> Int64Array:
    """Return `widths` with which `plan` and `divide` put one sample into each micro-batch.

    They are more than half of `max_tokens`, so that no two fit, and rise with the lengths: the ranks of one pass get samples
    about as long.

    Args:
        lengths: N integers, each from 1 to max_tokens.
        max_tokens: Tokens in one micro-batch at most.

    Raises:
        PackingError: lengths that cannot be used.


    >>> one_a_row([1, 50, 100], max_tokens=100).tolist()
    [51, 75, 100]
    """
    lengths_N = sample_lengths(lengths, checked_integer("max_tokens", max_tokens, 1, MAX_TOKENS), "max_tokens")
    most = max_tokens // 2 + 1
    return most + lengths_N * (max_tokens - most) // max_tokens


def checked_padding(
    widths: npt.ArrayLike | None, lines: npt.ArrayLike | None, num_samples: int, max_tokens: int
) -> tuple[Int64Array, Int64Array] | None:
    """Return widths and lines as int64[N], one line a sample by default; None without widths.

    Raises PackingError for lines without widths, other numbers of them, and a sample that takes more than max_tokens places.
    """
    if widths is None:
        if lines is not None:
            raise PackingError("lines are those of padded micro-batches: give widths too, or leave them out")
        return None
    checked_widths = integer_array("widths", widths)
    checked_lines = np.ones_like(checked_widths) if lines is None else integer_array("lines", lines)
    for name, array in (("widths", checked_widths), ("lines", checked_lines)):
        if array.size != num_samples:
            raise PackingError(f"{name} must have one entry a sample: got {array.size} for {num_samples} lengths")
        if array.min() < 1:
            raise PackingError(f"{name} must be at least 1, found {array.min()} at index {int(array.argmin())}")
    places = checked_widths * checked_lines
    if places.max() > max_tokens:
        raise PackingError(
            f"sample {int(places.argmax())} takes {places.max()} places, more than max_tokens={max_tokens}. Set max_tokens to "
            f"at least {places.max()}, or leave out longer samples before planning"
        )
    return checked_widths, checked_lines


def fewest_bits(values: Int64Array) -> npt.NDArray[np.unsignedinteger]:
    """Cast integers, none negative, to the fewest bits that hold them.

    numpy sorts 16 bits by counting, far faster than 64.
    """
    return values.astype(np.min_scalar_type(values.max()))
