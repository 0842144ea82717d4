"""Samples → a table small enough for millions: lengths, loss counts, hashes and places."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forge_data._example import TokenizedExample
from forge_data.findings._rules import Where
from forge_data.reading._record import place_of
from forge_data.store._duplicates import as_digests, digest
from forge_data.store._manifest import PREFERENCE, UNPAIRED
from forge_data.store._media import known_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forge_data.store._token_store import TokenStore


@attrs.frozen(eq=False, kw_only=True)
class SampleTable:
    """N samples that make up U units: a unit is one sample, or both sides of a preference."""

    lengths: "NDArray[np.int64]"
    """int64[N], tokens."""
    text_lengths: "NDArray[np.int64]"
    """int64[N], tokens that do not stand for an image."""
    loss_counts: "NDArray[np.int64]"
    """int64[N], labels that count in the loss."""
    digests: "NDArray[Any]"
    """(uint64, uint64)[U], a hash of the ids and images."""
    marks: "NDArray[np.int64]"
    """int64[U], what a unit is marked with beside its tokens, its label or margin: equal for equal ones, 0 for none."""
    firsts: "NDArray[np.int64]"
    """int64[U], the first sample of each unit."""
    where: Callable[[int], Where]
    """Place of a sample."""

    @classmethod
    def of(cls, store: "TokenStore") -> "SampleTable":
        """Make the table of a store, or of a view."""
        members, digests = store.units()
        lengths = store.lengths
        if store.has_media:
            lengths = lengths - np.array([_media_tokens(store[index]) for index in range(len(store))], dtype=np.int64)
        return cls(
            lengths=store.lengths,
            text_lengths=lengths,
            loss_counts=store.loss_counts,
            digests=digests,
            marks=_marks(store, len(members)),
            firsts=members[:, 0],
            where=lambda index: Where.of(store.source(index)),
        )


def _marks(store: "TokenStore", units: int) -> "NDArray[np.int64]":
    """Return int64[U]: the mark of each answer's being wanted, or of each pair's margin; or 0."""
    if store.kind == UNPAIRED:
        return store.desirable.astype(np.int64)
    if store.kind == PREFERENCE and (margins := store.margins) is not None:
        return np.array([mark_of(float(margin)) for margin in margins], dtype=np.int64)
    return np.zeros(units, dtype=np.int64)


def mark_of(given: object) -> int:
    """Return the mark of what is given beside tokens: equal for equal things, 0 or 1 for a bool."""
    if given is None or isinstance(given, bool):
        return int(bool(given))
    given = np.float32(given).tobytes() if isinstance(given, float) else repr(given).encode()
    return int.from_bytes(hashlib.blake2b(given, digest_size=8).digest(), "little", signed=True)


class TableBuilder:
    """Collects samples, one row at a time, for a `SampleTable`."""

    def __init__(self) -> None:
        self._lengths, self._text_lengths = array("q"), array("q")
        self._loss_counts, self._firsts, self._marks = array("q"), array("q"), array("q")
        self._rows, self._files = array("q"), array("i")
        self._digests = bytearray()
        self._names: dict[tuple[str, bool], int] = {}

    def add(self, where: Where, samples: Sequence[TokenizedExample], *, pair: bool, mark: int = 0) -> None:
        """Add the samples of one row, which has one `mark`; those of a `pair` are one unit."""
        units = [samples] if pair and samples else [(sample,) for sample in samples]
        for unit in units:
            self._firsts.append(len(self._lengths))
            self._marks.append(mark)
            media = b"".join(known_of(sample.media) for sample in unit)
            self._digests += digest([sample.input_ids for sample in unit], media)
            for sample in unit:
                self._lengths.append(len(sample))
                self._text_lengths.append(len(sample) - _media_tokens(sample))
                self._loss_counts.append(sample.loss_count)
                self._rows.append(where.row or 0)
                indexed = where.place.endswith("]")
                self._files.append(self._names.setdefault((where.file, indexed), len(self._names)))

    def build(self) -> SampleTable:
        """Make the table of everything that was added."""
        names, rows, files = list(self._names), self._rows, self._files

        def where(sample: int) -> Where:
            file, indexed = names[files[sample]]
            return Where(file, rows[sample], place_of(file, rows[sample], indexed=indexed))

        collected = (self._lengths, self._text_lengths, self._loss_counts, self._firsts, self._marks)
        lengths, text_lengths, loss_counts, firsts, marks = (np.array(values, dtype=np.int64) for values in collected)
        return SampleTable(
            lengths=lengths,
            text_lengths=text_lengths,
            loss_counts=loss_counts,
            digests=as_digests(self._digests),
            marks=marks,
            firsts=firsts,
            where=where,
        )


def _media_tokens(sample: TokenizedExample) -> int:
    return sum(medium.stop - medium.start for medium in sample.media)
