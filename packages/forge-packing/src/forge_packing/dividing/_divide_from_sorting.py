"""Integers to a quick sort of them, and a sorted array to its pieces: what numpy does faster when it is asked this way."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from forge_packing._checks import Int64Array


def narrow(values: Int64Array) -> npt.NDArray[np.unsignedinteger]:
    """The same integers, none negative, in as few bits as they need: numpy sorts 16 bits by counting, far faster than 64."""
    return values.astype(np.min_scalar_type(values.max()))


def cut(array: Int64Array, starts: Int64Array) -> list[Int64Array]:
    """The pieces between neighbouring starts, as views. np.split takes three times as long."""
    return [array[start:stop] for start, stop in pairwise(starts.tolist())]
