"""Rows that are refused and left out (`on_bad_row=skip`): counts by reason, and the limit."""

from collections import Counter

import attrs

from forge_data._errors import BadPairError, DataError, ForgeDataError
from forge_data._values import counted

_SHOWN = 3


def of_a_row(error: ForgeDataError) -> ForgeDataError:
    """Mark an error as one row's, which `on_bad_row=skip` would leave out."""
    error.of_a_row = True
    return error


def refuse(_row: int, error: ForgeDataError) -> None:
    """Raise the error of a row that cannot be read, in the place of leaving the row out."""
    raise of_a_row(error)


def name_remedy(error: ForgeDataError) -> None:
    """Say in the error of a row, where others could be used, by which setting it is left out.

    How many rows are bad is not known yet, so no share is proposed; `BadRows.check` names the one that it takes.
    """
    remedy = "on_bad_row=skip leaves such rows out; `max_bad_rows` is the share of all rows that they may be, 0.01 if not set"
    if isinstance(error, BadPairError):
        remedy = "on_bad_pair=skip leaves such rows out"
    if error.of_a_row and error.args and remedy not in str(error.args[0]):
        error.args = (f"{error.args[0]} ({remedy})", *error.args[1:])


@attrs.define
class BadRows:
    """Count of rows that were left out because they are refused, and the first few of them."""

    reasons: Counter[str] = attrs.field(factory=Counter)
    first: list[str] = attrs.field(factory=list)
    """Errors of the first few, in order."""

    def add(self, reason: str, error: str) -> None:
        """Count a row."""
        self.reasons[reason] += 1
        if len(self.first) < _SHOWN:
            self.first.append(error)

    def check(self, read: int, share: float) -> None:
        """Refuse more of them than a share of the rows.

        Raises:
            DataError: how many there are, by reason, and the first few.
        """
        too_many = self.too_many(read, share)
        if too_many is not None:
            raise DataError(f"{too_many}; mend these rows{self._or_raise(read)}")

    def _or_raise(self, read: int) -> str:
        """Say which share lets the other rows be used, in hundredths; nothing where there are none."""
        count = self.reasons.total()
        if count == read:
            return ""
        # The comparison of `too_many`: 0.29 * 100 is less than 29.
        share = next(part / 100 for part in range(1, 101) if count <= part / 100 * read)
        return f", or raise `max_bad_rows` to {share:g}"

    def too_many(self, read: int, share: float) -> str | None:
        """Say in a message that they are more than a share of the rows; None where they are not."""
        count = self.reasons.total()
        if count <= share * read:
            return None
        listed = ", ".join(f"{each:,} {reason}" for reason, each in sorted(self.reasons.items()))
        more = f" (and {count - len(self.first):,} more)" if count > len(self.first) else ""
        return (
            f"{count:,} of {counted(read, 'rows')} ({count / read:.1%}) {'is' if count == 1 else 'are'} refused: {listed}; "
            f"`max_bad_rows` allows {share:.1%}. The first of them{more}: {' | '.join(self.first)}"
        )
