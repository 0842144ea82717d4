"""One of several equal parts of all rows: `3/16` is the third of sixteen, from 1."""

import re
from typing import Self

import attrs

from forge_data._errors import DataError

_SHARD = re.compile(r"([1-9]\d*)/([1-9]\d*)")


@attrs.frozen
class Shard:
    """Part of the rows that one process prepares; all parts together are merged into one store.

    >>> print(Shard.parse("3/16"))
    part 3 of 16
    """

    index: int
    """Number of the part, from 1."""
    of: int
    """Number of parts."""
    rows: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    """First and last row of each file that is in it, such as `train.jsonl:1001 to train.jsonl:1500`."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `K/N`.

        Raises:
            DataError: it is something else, or there is no such part.
        """
        found = _SHARD.fullmatch(text) if isinstance(text, str) else None
        if found is None or int(found[1]) > int(found[2]):
            raise DataError(f"`shard` is {text!r}; give K/N with K from 1 to N, such as 3/16 for the third of sixteen parts")
        return cls(int(found[1]), int(found[2]))

    def bounds(self, total: int) -> tuple[int, int]:
        """Return [start, stop) of the part among `total` things in a row.

        >>> [Shard(index, 3).bounds(10) for index in (1, 2, 3)]
        [(0, 3), (3, 6), (6, 10)]
        """
        return total * (self.index - 1) // self.of, total * self.index // self.of

    def __str__(self) -> str:
        return f"part {self.index} of {self.of}" + (f": {', '.join(self.rows)}" if self.rows else "")
