"""Samples of which one is refused → the examples of the others, and its error in its place."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from forge_data._errors import ForgeDataError

S = TypeVar("S")
E = TypeVar("E")


def encode_apart(
    encode: Callable[[Sequence[S]], Sequence[E]], samples: Sequence[S], error: ForgeDataError
) -> "Iterator[E | ForgeDataError]":
    """Encode samples that are refused together; yield each one's result, or its own error.

    They are halved until a refused one is alone, and only as far as results are asked for.

    Args:
        encode: encodes samples in one call, which is quicker than one at a time.
        samples: samples that `encode` refuses together.
        error: what it raised.
    """
    if len(samples) == 1:
        yield error
        return
    half = len(samples) // 2
    for part in (samples[:half], samples[half:]):
        try:
            encoded = encode(part)
        except ForgeDataError as found:
            yield from encode_apart(encode, part, found)
        else:
            yield from encoded
