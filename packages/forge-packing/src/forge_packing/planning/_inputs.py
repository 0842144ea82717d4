"""Inputs of a plan: the arguments of `plan`, checked together before anything is planned."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from forge_packing._checks import (
    MAX_RANKS,
    MAX_TOKENS,
    Int64Array,
    checked_bool,
    checked_integer,
    integer_array,
    sample_lengths,
    sample_loss_counts,
)
from forge_packing._errors import PackingError
from forge_packing.dividing._cost import Cost
from forge_packing.dividing._padded import checked_padding
from forge_packing.dividing._prefixes import checked_prefixes, checked_repeated, refuse_both
from forge_packing.ordering._mixture import whole_shares

ARRAYS = ("lengths", "loss_counts", "sources", "weights", "widths", "lines", "prefixes", "prefix_tokens", "repeated")
"""Inputs of a plan that are int64 arrays, or None where they were not given."""

NAMES = {
    *ARRAYS,
    *("batch_size", "max_tokens", "world_size", "seed", "epochs", "max_steps", "shuffle", "drop_last", "cost"),
}
"""All inputs of a plan: the arguments of `plan`, and the fields of BatchPlan."""

# Positions, and draws of a source, are int64: the longest run over the most samples stays within it.
_MAX_BATCH = 2**31 - 1
_MAX_STEPS = 2**48


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check every argument of `plan`; return ints, bools and read-only int64 arrays by name.

    Raises PackingError for arguments that no plan can be made from.
    """
    max_tokens = checked_integer("max_tokens", given["max_tokens"], 1, MAX_TOKENS)
    batch_size = checked_integer("batch_size", given["batch_size"], 1, _MAX_BATCH)
    world_size = checked_integer("world_size", given["world_size"], 1, MAX_RANKS)
    limits = {
        name: None if given[name] is None else checked_integer(name, given[name], 1, most)
        for name, most in (("epochs", 2**32), ("max_steps", _MAX_STEPS))
    }
    drop_last, shuffle = (checked_bool(name, given[name]) for name in ("drop_last", "shuffle"))
    seed = checked_integer("seed", given["seed"], 0, 2**32 - 1)
    if batch_size < world_size:
        raise PackingError(
            f"batch_size={batch_size} is less than world_size={world_size}: a step has no sample for some ranks. "
            f"Set batch_size to at least {world_size}, or use fewer ranks"
        )
    if not isinstance(given["cost"], Cost):
        raise PackingError(f"cost must be a Cost, got {given['cost']!r}. Give Cost(...), or Cost.for_model(...)")
    lengths = sample_lengths(given["lengths"], max_tokens, "max_tokens")
    if drop_last and lengths.size < batch_size:
        raise PackingError(
            f"drop_last leaves no step: {lengths.size} samples are fewer than batch_size={batch_size}. "
            "Lower batch_size, or set drop_last=False"
        )
    loss_counts = None if given["loss_counts"] is None else sample_loss_counts(given["loss_counts"], lengths)
    sources, weights = _mixture(given["sources"], given["weights"], lengths.size)
    widths, lines = checked_padding(given["widths"], given["lines"], lengths.size, max_tokens) or (None, None)
    repeated = checked_repeated(given["repeated"], lengths)
    shared = checked_prefixes(given["prefixes"], given["prefix_tokens"], lengths, repeated)
    refuse_both(widths, prefixes=shared, repeated=repeated)
    prefixes, prefix_tokens = shared or (None, None)
    for array in (lengths, loss_counts, sources, weights, widths, lines, prefixes, prefix_tokens, repeated):
        if array is not None:
            array.setflags(write=False)
    return {
        "lengths": lengths,
        "loss_counts": loss_counts,
        "sources": sources,
        "weights": weights,
        "widths": widths,
        "lines": lines,
        "prefixes": prefixes,
        "prefix_tokens": prefix_tokens,
        "repeated": repeated,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "world_size": world_size,
        "seed": seed,
        **limits,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "cost": given["cost"],
    }


def _mixture(sources: npt.ArrayLike | None, weights: object, num_samples: int) -> tuple[Int64Array | None, Int64Array | None]:
    """Check sources int64[N] and weights int64[M]; both None without weights.

    Without weights each sample comes once an epoch, whatever its source.
    """
    if weights is None:
        return None, None
    shares = whole_shares(weights)
    if sources is None and shares.size > 1:
        raise PackingError(f"weights are given for {shares.size} sources, and no sources: give the source of each sample")
    numbers = np.zeros(num_samples, dtype=np.int64) if sources is None else integer_array("sources", sources)
    if numbers.size != num_samples:
        raise PackingError(f"sources must have one entry a sample: got {numbers.size} for {num_samples} lengths")
    bad = np.flatnonzero((numbers < 0) | (numbers >= shares.size))
    if bad.size:
        raise PackingError(
            f"sources must be numbers from 0 to {shares.size - 1}, one for each of {shares.size} weights, "
            f"found {numbers[bad[0]]} at index {bad[0]}"
        )
    empty = np.flatnonzero(np.bincount(numbers, minlength=shares.size) == 0)
    if empty.size:
        raise PackingError(
            f"source {empty[0]} has a weight and no sample: its share cannot be kept. Leave the source out, or check its data"
        )
    return numbers, shares
