"""Rows read, kept and dropped: the books that must balance."""

from collections.abc import Mapping
from types import MappingProxyType

import attrs

NO_TRAINED_TOKEN = "no_trained_token"  # noqa: S105
TOO_LONG = "longer_than_max_seq_len"


def _frozen(reasons: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(sorted(reasons.items())))


@attrs.frozen
class Accounting:
    """What became of every row of a file; `kept + sum(dropped.values()) == read`, always.

    >>> print(Accounting(read=10, kept=7, dropped={"no_trained_token": 1, "longer_than_max_seq_len": 2}))
    kept 7 of 10 rows; dropped 2 longer_than_max_seq_len, 1 no_trained_token
    """

    read: int
    """Rows in the file."""

    kept: int
    """Rows that became samples."""

    dropped: Mapping[str, int] = attrs.field(converter=_frozen, factory=dict)
    """Rows left out, by reason."""

    def __attrs_post_init__(self) -> None:
        counts = (self.read, self.kept, *self.dropped.values())
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
            raise ValueError(f"counts of rows must be whole and not negative, got {counts}")
        if self.kept + sum(self.dropped.values()) != self.read:
            raise ValueError(f"rows do not add up: read {self.read}, kept {self.kept}, dropped {dict(self.dropped)}")

    def __str__(self) -> str:
        text = f"kept {self.kept:,} of {self.read:,} rows"
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
        return f"{text}; dropped {reasons}" if reasons else text

    def __reduce__(self) -> tuple[type["Accounting"], tuple[int, int, dict[str, int]]]:
        # A read-only mapping does not pickle; the plain one that it was made of does.
        return Accounting, (self.read, self.kept, dict(self.dropped))

    def as_dict(self) -> dict[str, object]:
        """Plain numbers and strings, for JSON."""
        return {"read": self.read, "kept": self.kept, "dropped": dict(self.dropped)}
