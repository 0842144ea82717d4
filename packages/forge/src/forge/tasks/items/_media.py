"""Samples with media → rows whose forward is given what a processor makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import attrs

from forge._counted import counted

if TYPE_CHECKING:
    import forge_data
    import forge_packing
    from forge.tasks.items._items import Ints

MediaInputs = Sequence[Mapping[str, Any]]
"""Of each document of a row what a processor makes of its images."""
MediaRows = Literal["packed", "lines", "single"]
"""Whether a micro-batch with images is a packed row, padded lines, or one sample."""

_each = ThreadPoolExecutor(4, "images")
_next = ThreadPoolExecutor(1, "next-images")
"""Waits for `_each`, and so is another."""


def media_in_words(store: forge_data.TokenStore | forge_data.PromptStore, counts: Ints) -> str:
    """Say how many media and tokens of media int64[N, 2] has; "" of a store without any."""
    if not store.has_media:
        return ""
    media, tokens = (int(number) for number in counts.sum(axis=0))
    rows = int((counts[:, 0] > 0).sum())
    each = ", counted in each of a row's samples" if len(store) > len(counts) else ""
    what = counted(media, media_names(store))
    return f"; {what}{each}, for which {counted(tokens, 'tokens')} stand, in {rows:,} of the rows"


_NAMES = {"image": "images", "video": "videos", "audio": "audio clips"}


def media_names(*stores: Any) -> str:
    """Name the kinds of media of stores, such as "images" or "images, videos and audio clips"."""
    found = {kind for store in stores for kind in getattr(store, "media_kinds", ())}
    *others, last = [name for kind, name in _NAMES.items() if kind in found] or ["images"]
    return f"{', '.join(others)} and {last}" if others else last


_KEPT = 8
"""Prompts whose images are kept as arrays: a prompt's completions follow each other."""


class PromptMedia(Mapping[int, "Mapping[str, Any]"]):
    """Rows of prompts with images → what a processor makes of them, when it is asked for."""

    def __init__(
        self, store: forge_data.PromptStore, inputs: forge_data.MediaInputs, asked: Callable[[int], Any] | None = None
    ) -> None:
        """Make none yet; `asked` gives a row's prompt in other words, with the same images."""
        self.join = inputs.join
        self._rows = store.media_counts[:, 0].nonzero()[0].tolist()
        self._known = frozenset(self._rows)
        self._made = lru_cache(_KEPT)(lambda row: inputs((asked or store.__getitem__)(row), store.source(row)))

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        if row not in self._known:
            raise KeyError(row)
        return self._made(row)

    def __contains__(self, row: object) -> bool:
        return row in self._known

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@attrs.frozen(kw_only=True, eq=False)
class MediaRow:
    """A packed row with images, as `forge_algos.PackedBatch` or `PackedGroups`."""

    packed: forge_packing.PackedBatch | forge_packing.PackedGroups = attrs.field(repr=False)
    media_inputs: Callable[[], MediaInputs] = attrs.field(repr=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packed, name)


def media_row(
    row: forge_packing.PackedBatch | forge_packing.PackedGroups,
    samples: Sequence[forge_data.TokenizedExample],
    places: Sequence[str],
    inputs: forge_data.MediaInputs,
) -> Any:
    """Return a row of samples, with their images where one has some; `places` are for errors."""
    if not any(sample.media for sample in samples):
        return row
    return MediaRow(packed=row, media_inputs=lambda: inputs.join(list(_each.map(inputs, samples, places))))


def media_row_of(
    row: forge_packing.PackedBatch | forge_packing.PackedGroups,
    store: forge_data.TokenStore,
    indices: Sequence[int] | Ints,
    inputs: forge_data.MediaInputs,
) -> Any:
    """Return a row of a store's samples, with their images where one has some."""
    return media_row(row, [store[int(i)] for i in indices], [store.source(int(i)) for i in indices], inputs)


_READ = ("",), ("mismatched",), ("completions",), ("groups", "teacher")
"""Fields of micro-batches that are rows, in the order in which a step reads them: KTO's mismatched answers of all before."""


def read_ahead(batches: Sequence[Any]) -> list[Any]:
    """Return the micro-batches of a step, whose images are read ahead.

    Those of each are read while the one before is computed, and the first ones' from now on. Those of no more than two rows are
    held at once: of the last one that was asked for, which a reference is given too, and of the next.
    """
    rows_of = [_rows_of(batch) for batch in batches]
    with_media = [rows[name] for names in _READ for rows in rows_of for name in names if name in rows]
    ahead = iter(with_media)
    started: list[Future[MediaInputs]] = []

    def start() -> None:
        if (row := next(ahead, None)) is not None:
            started.append(_next.submit(row.media_inputs))

    def read(row: Any, number: int) -> MediaInputs:
        if number == next(iter(last), None):  # a second look at the row
            return last[number]
        last.clear()
        if number != taken[0] or not started:  # rows from the first again
            last[number] = row.media_inputs()
            return last[number]
        taken[0] += 1
        last[number] = started.pop().result()
        start()
        return last[number]

    taken, last = [0], dict[int, MediaInputs]()
    start()
    numbers = {id(row): number for number, row in enumerate(with_media)}

    def ahead_of(batch: Any, rows: dict[str, Any]) -> Any:
        ahead = {name: attrs.evolve(row, media_inputs=partial(read, row, numbers[id(row)])) for name, row in rows.items()}
        return ahead.get("") or (attrs.evolve(batch, **ahead) if ahead else batch)

    return [*map(ahead_of, batches, rows_of)]


def _rows_of(batch: Any) -> dict[str, Any]:
    """Return the rows with images that a micro-batch has, by field; "" where it is one itself."""
    if getattr(batch, "media_inputs", None) is not None:
        return {"": batch}
    found = {name: getattr(batch, name, None) for names in _READ for name in names if name}
    return {name: row for name, row in found.items() if getattr(row, "media_inputs", None) is not None}
