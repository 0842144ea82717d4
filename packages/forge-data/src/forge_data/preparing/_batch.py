"""Encoded rows → `Batch`: flat arrays and counts, small to send, quick to append to a store."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import numpy as np

from forge_data._accounting import NOTHING_WITHIN, TOO_LONG
from forge_data._example import IGNORED, ROLES, TokenizedExample
from forge_data.store._dropped import Dropped
from forge_data.store._manifest import ALONE, MARGINS, SHARED, WEIGHTS
from forge_data.store._media import arrays_of_media
from forge_data.tokenizing._overflow import Fitted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forge_data.findings._finding import Finding
    from forge_data.formats._samples import Encoded

_ROLE_NUMBERS = {role: number for number, role in enumerate(ROLES)}


class Seen(NamedTuple):
    """Rows of one format."""

    first: str
    """Place of the first of them."""
    count: int


@attrs.define(kw_only=True, eq=False)
class Batch:
    """Rows of one chunk of a source, in order, up to its end or the first row that is refused."""

    source: int
    """Number of the source."""
    last_row: int
    """Last row of the source that was read."""
    kinds: dict[str, str]
    """Kinds of its samples, as in the manifest, each with the place of its first row; a second one ends the batch."""
    arrays: dict[str, "NDArray[Any]"]
    """Arrays as in the store, but `offsets.bin` and `segment_offsets.bin` hold a count for each sample."""
    read: int
    kept: int
    tokens_read: int
    tokens_lost: "Counter[str]"
    dropped: list[Dropped]
    forms: "Counter[str]"
    """Rows by how they were rendered, where the rows do not say it."""
    formats: dict[str, Seen]
    """Formats of its rows, in the order in which they occurred; a second one ends the batch."""
    shortest_too_long: int | None
    """Tokens of the shortest row that did not fit."""
    findings: list["Finding"]
    columns: frozenset[str]
    """Columns of its rows, where some are renamed."""
    error: Exception | None
    """Error of the row after the last one here."""


class BatchBuilder:
    """Collects rows, one by one, for a `Batch`."""

    def __init__(self, columns: frozenset[str] = frozenset()) -> None:
        self.columns = columns
        self.read = self.kept = self.tokens_read = 0
        self.dropped: list[Dropped] = []
        self.tokens_lost: Counter[str] = Counter()
        self.forms: Counter[str] = Counter()
        self.formats: dict[str, Seen] = {}
        self.kinds: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.shortest_too_long: int | None = None
        self._examples: list[TokenizedExample] = []
        self._rows: list[int] = []
        self._shared: list[int] = []
        self._desirable: list[bool] = []
        self._margins: list[float | None] = []

    def see_format(self, name: str, place: str) -> bool:
        """Count a row of a format; return whether the rows before it have the same."""
        first, count = self.formats.get(name, (place, 0))
        self.formats[name] = Seen(first, count + 1)
        return len(self.formats) == 1

    def see_kind(self, kind: str, place: str) -> bool:
        """Record the kind of a row's samples; return whether the rows before it have the same."""
        self.kinds.setdefault(kind, place)
        return len(self.kinds) == 1

    def add(self, row: int, encoded: "Encoded", fitted: Fitted, error: str = "") -> None:
        """Count a row that was tokenised, and keep its samples; with `error` it was refused."""
        tokens = sum(map(len, encoded.examples))
        self.read += 1
        self.tokens_read += tokens
        self.tokens_lost.update(fitted.lost)
        if fitted.reason is not None:
            self.dropped.append(Dropped(row, fitted.reason, tokens, error))
            if fitted.reason in (TOO_LONG, NOTHING_WITHIN):
                longest = max(map(len, encoded.examples))
                self.shortest_too_long = min(longest, self.shortest_too_long or longest)
            return
        self.kept += 1
        self.forms.update(encoded.forms)
        self._examples += fitted.kept
        self._rows += [row] * len(fitted.kept)
        self._shared += _shared(fitted.kept) if len(encoded.examples) > 1 and not encoded.pair else [ALONE] * len(fitted.kept)
        if encoded.desirable is not None:
            self._desirable += [encoded.desirable] * len(fitted.kept)
        elif encoded.pair:
            self._margins.append(encoded.margin)

    def leave_out(self, row: int, reason: str, error: str = "") -> None:
        """Count a row that was not tokenised; with `error` it was refused."""
        self.read += 1
        self.dropped.append(Dropped(row, reason, 0, error))

    def build(self, source: int, last_row: int, error: Exception | None) -> Batch:
        """Make the batch of all rows."""
        return Batch(
            source=source,
            last_row=last_row,
            kinds=self.kinds,
            arrays=self._arrays(),
            read=self.read,
            kept=self.kept,
            tokens_read=self.tokens_read,
            tokens_lost=self.tokens_lost,
            # Rows that were not tokenised were counted at once, the others with their call.
            dropped=sorted(self.dropped, key=lambda each: each.row),
            forms=self.forms,
            formats=self.formats,
            shortest_too_long=self.shortest_too_long,
            findings=sorted(self.findings, key=lambda each: each.row or 0),
            columns=self.columns,
            error=error,
        )

    def _arrays(self) -> dict[str, "NDArray[Any]"]:
        examples = self._examples
        labels = _joined([example.labels for example in examples], np.int32)
        made = {
            "input_ids.bin": _joined([example.input_ids for example in examples], np.int32),
            "loss_mask.bin": (labels != IGNORED).astype(np.uint8),
            "offsets.bin": np.array([len(example) for example in examples], dtype=np.int64),
            "rows.bin": np.array(self._rows, dtype=np.int64),
            "segment_starts.bin": _joined([example.segments[:, 0] for example in examples], np.int32),
            "segment_roles.bin": np.array([_ROLE_NUMBERS[role] for example in examples for role in example.roles], np.uint8),
            "segment_offsets.bin": np.array([len(example.roles) for example in examples], dtype=np.int64),
        }
        if any(example.weights is not None for example in examples):
            weights = [example.labels != IGNORED if example.weights is None else example.weights for example in examples]
            made[WEIGHTS] = _joined(weights, np.float32)
        # Also where turns share nothing: what the store says of a row does not depend on other rows of its chunk.
        if any(count != ALONE for count in self._shared):
            made[SHARED] = np.array(self._shared, dtype=np.int32)
        if any(example.media for example in examples):
            made |= arrays_of_media([example.media for example in examples])
        if self._desirable:
            made["desirable.bin"] = np.array(self._desirable, dtype=np.uint8)
        if any(margin is not None for margin in self._margins):
            # NaN for a row without margin, so that `_check_margins` sees it.
            made[MARGINS] = np.array([np.nan if each is None else each for each in self._margins], dtype=np.float32)
        return made


def _joined(parts: list["NDArray[Any]"], dtype: type[np.generic]) -> "NDArray[Any]":
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)


def _shared(turns: Sequence[TokenizedExample]) -> list[int]:
    """Count the first tokens of each turn's sample that a later turn's has too.

    The last token of a sample is none of them, so that something is left.
    """
    counts = [ALONE] * len(turns)
    for at, turn in enumerate(turns[:-1]):
        counts[at] = max(
            min(_common(turn.input_ids[:-1], later.input_ids), _common_media(turn, later)) for later in turns[at + 1 :]
        )
    return counts


def _common_media(turn: TokenizedExample, later: TokenizedExample) -> int:
    """Return where the first image begins that the other sample has not, or has elsewhere."""
    theirs = {(medium.sha256, medium.start, medium.stop) for medium in later.media}
    return next((medium.start for medium in turn.media if (medium.sha256, medium.start, medium.stop) not in theirs), len(turn))


def _common(ids: "NDArray[np.int32]", later: "NDArray[np.int32]") -> int:
    size = min(len(ids), len(later))
    same = ids[:size] == later[:size]
    return size if same.all() else int(same.argmin())
