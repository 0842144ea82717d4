"""Store and indices → what is shown of each sample, from the arrays that are trained on."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from forge_data._errors import DataError, ForgeDataError
from forge_data._example import IGNORED, ROLES
from forge_data._media import Media
from forge_data._values import counted
from forge_data.media._read import name_of
from forge_data.viewing._token_text import Piece, TokenTexts, characters

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from forge_data.store._base import Store
    from forge_data.store._token_store import TokenStore


@attrs.frozen(eq=False)
class Segment:
    """Tokens [start, stop) of one role."""

    start: int
    stop: int
    role: str


@attrs.frozen(eq=False)
class View:
    """One sample of S tokens, as it is shown."""

    index: int
    place: str
    """Place of its row, such as `train.jsonl:417`."""
    ids: list[int]
    pieces: list[Piece]
    texts: list[str]
    """S texts; a character that several tokens share is in the first."""
    inside: list[bool]
    """For each token, whether it begins inside such a character."""
    learned: "NDArray[np.bool_]"
    """bool[S], true where the label is not -100."""
    loss_count: int
    segments: list[Segment]
    standing: str = ""
    """`chosen` or `rejected`, `desirable` or `undesirable`; empty for a supervised sample."""
    partner: int | None = None
    """Sample of the other answer, for a preference."""
    held_out: bool = False
    """Whether it is measured, and not trained on."""
    columns: list[tuple[str, str]] = attrs.field(factory=list)
    """Further fields of a prompt's row, as JSON."""
    media: list[tuple[int, int]] = attrs.field(factory=list)
    """Tokens [start, stop) of each image: the text of the first names the image, and the others have none."""
    pictures: tuple[Media, ...] = ()
    """The images themselves."""

    def runs(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """List the learned stretches [start, stop) of a part of the sample, in order."""
        mask = self.learned[start:stop].astype(np.int8)
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)) + start
        return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def views(store: "TokenStore", indices: Iterable[int]) -> Iterator[View]:
    """Make one view a sample."""
    texts = TokenTexts(stored_tokenizer(store))
    standing, held_out = _standings(store), store.held_out
    for index in indices:
        example = store[index]
        ids = example.input_ids.tolist()
        pieces = texts.of(ids)
        shown, inside = characters(pieces)
        show_media(example.media, shown, inside)
        yield View(
            index=index,
            place=store.source(index),
            ids=ids,
            pieces=pieces,
            texts=shown,
            inside=inside,
            learned=example.labels != IGNORED,
            loss_count=example.loss_count,
            segments=[
                Segment(start, stop, role) for (start, stop), role in zip(example.segments.tolist(), example.roles, strict=True)
            ]
            or [Segment(0, len(ids), ROLES[-1])],
            standing=standing.get(index, ("", None))[0],
            partner=standing.get(index, ("", None))[1],
            held_out=index in held_out,
            media=[(medium.start, medium.stop) for medium in example.media],
            pictures=example.media,
        )


def show_media(media: Iterable[Media], texts: list[str], inside: list[bool]) -> None:
    """Put the name of each image in the place of its tokens' texts, as `View` has them."""
    for medium in media:
        size = medium.stop - medium.start
        texts[medium.start : medium.stop] = [
            f"<{medium.kind} {name_of(medium)}, {counted(size, 'tokens')}>",
            *[""] * (size - 1),
        ]
        inside[medium.start : medium.stop] = [False] * size


def held_out_line(store: "Store") -> str | None:
    """Write how many samples are held out; None where none is."""
    number = len(store.held_out)
    return f"held out: {number:,} of {len(store):,}, measured and not trained on" if number else None


def stored_tokenizer(store: "Store") -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer in the store; None where there is none, and only ids can be shown."""
    try:
        return store.tokenizer()
    except ForgeDataError:
        return None


def chosen_indices(store: "Store", indices: int | slice | Iterable[int] | None, default: int) -> list[int]:
    """Return indices counted from the front; the first `default` samples for None.

    Raises:
        DataError: one that the store does not have, or that is not a whole number.
    """
    count = len(store)
    if indices is None:
        return list(range(min(default, count)))
    if isinstance(indices, slice):
        found = list(range(count))[indices]
        if count and not found:
            raise DataError(f"no sample lies in {_words(indices)}: the store has 0 to {count - 1}")
        return found
    wanted = [indices] if isinstance(indices, (int, np.integer)) else list(indices)
    for index in wanted:
        if isinstance(index, (bool, np.bool_)) or not isinstance(index, (int, np.integer)):
            raise DataError(f"an index must be a whole number, got {index!r}")
        if not -count <= index < count:
            raise DataError(f"no sample {index}: the store has 0 to {count - 1}")
    return [int(index) % count for index in wanted]


def _words(asked: slice) -> str:
    return ":".join(
        "" if edge is None else str(edge) for edge in (asked.start, asked.stop, *([asked.step] if asked.step else []))
    )


def _standings(store: "TokenStore") -> dict[int, tuple[str, int | None]]:
    """Map each sample to its part in its preference, and its partner."""
    found: dict[int, tuple[str, int | None]] = {}
    if store.kind == "preference":
        try:
            pairs = store.pairs.tolist()
        except ForgeDataError:  # a view of one side of a preference
            return found
        for chosen, rejected in pairs:
            found[chosen], found[rejected] = ("chosen", rejected), ("rejected", chosen)
    elif store.kind == "unpaired_preference":
        found = {index: ("desirable" if wanted else "undesirable", None) for index, wanted in enumerate(store.desirable)}
    return found
