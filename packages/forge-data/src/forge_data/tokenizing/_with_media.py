"""Conversation or text with media → text as the model's processor writes it, and tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forge_data._errors import DataError
from forge_data._media import Media
from forge_data.chat_template._trace import Run
from forge_data.formats._samples import Chat, Note, Text
from forge_data.masking._conversation import Conversation
from forge_data.masking._media import moved, moved_span
from forge_data.media._expanded import PlainText
from forge_data.media._processor import ModelProcessor
from forge_data.media._read import close

if TYPE_CHECKING:
    from numpy.typing import NDArray


@attrs.frozen(eq=False)
class MediaSpans:
    """The media of a text, and what the processor makes of it."""

    place: str
    media: tuple[Media, ...]
    spans: list[tuple[int, int]]
    """Characters that stand for each medium."""
    ids: "NDArray[np.int32]"
    """int32[S], the processor's tokens of the whole text."""
    processor: ModelProcessor
    runs: list[Run]
    """Characters of the text by message, or by field."""
    fields: tuple[str, ...] = ()
    """Of a text that is no conversation, its fields."""

    def tokens(self, ids: "NDArray[np.int32]", offsets: "NDArray[np.int64]") -> tuple[Media, ...]:
        """Return the media with the tokens that stand for each.

        Args:
            ids: int32[S], tokens of the text.
            offsets: int64[S, 2], the characters that each stands for.

        Raises:
            DataError: the processor makes other tokens of the text, or a text of the row has a token of an image in it.
        """
        if not np.array_equal(ids, self.ids):
            size = min(len(ids), len(self.ids))
            at = int(np.argmax(np.append(ids[:size] != self.ids[:size], True)))
            raise DataError(
                f"{self.place}: the model's processor makes other tokens of the row than its text has ({len(self.ids)}, not "
                f"{len(ids)}, from token {at} on), so it changes more than placeholders of media; rows with these of this "
                "model cannot be trained here"
            )
        found = []
        outside = np.isin(ids, [*self.processor.token_ids])
        for medium, (start, stop) in zip(self.media, self.spans, strict=True):
            (inside,) = np.nonzero((offsets[:, 0] >= start) & (offsets[:, 1] <= stop))
            marks_alone = medium.kind == "audio" and len(inside) and not self.processor.count(ids[inside])
            if start == stop or marks_alone:
                raise DataError(
                    f"{self.place}: field {medium.field}: {self.processor.name} makes no token of this {medium.kind}, which is "
                    "too short or too small for it; take the row out"
                )
            if not len(inside):
                raise DataError(
                    f"{self.place}: field {medium.field}: no token stands for this {medium.kind} alone, since the tokenizer "
                    "joins it with the text around it; use the processor's own tokenizer"
                )
            first, last = int(inside[0]), int(inside[-1]) + 1
            outside[first:last] = False
            found.append(attrs.evolve(medium, start=first, stop=last))
        if outside.any():
            at = int(np.argmax(outside))
            place, token = int(offsets[at, 0]), self.processor.text_of(int(ids[at]))
            of = next((owner for start, stop, owner in self.runs if start <= place < stop and owner >= 0), None)
            where = "a text of the row" if of is None else f"field {self.fields[of] if self.fields else f'messages[{of}]'}"
            raise DataError(
                f"{self.place}: {where} has {token!r} in it, which stands for a part of a medium of this model; take it out of "
                "the text"
            )
        return tuple(found)


def expanded(chat: Chat, made: Conversation, processor: ModelProcessor) -> tuple[Conversation, MediaSpans | None]:
    """Put what stands for each medium into the text of a conversation.

    Raises:
        DataError: a medium is missing or broken, or the processor refuses it.
        TokenizerError: the processor does not say what it writes for a medium.
    """
    if not made.media:
        return made, None
    with _read(processor, chat.media[: made.media], chat.place) as (read, media, notes):
        written = processor.expand(made.text, read, chat.place)
    starts, stops, texts = zip(*written.replacements, strict=True)
    sizes = [len(text) for text in texts]
    parts, at = [], 0
    for start, stop, text in written.replacements:
        parts += made.text[at:start], text
        at = stop
    places = moved(stops, starts, stops, sizes)
    conversation = attrs.evolve(
        made,
        text="".join([*parts, made.text[at:]]),
        notes=(*made.notes, *notes),
        spans=[moved_span(span, starts, stops, sizes) for span in made.spans],
        runs=[(*moved((start, stop), starts, stops, sizes), owner) for start, stop, owner in made.runs],
        masked=tuple((start, stop) for start, stop in (moved(ends, starts, stops, sizes) for ends in made.masked)),
    )
    spans = [(place - size, place) for place, size in zip(places, sizes, strict=True)]
    return conversation, MediaSpans(chat.place, tuple(media), spans, written.ids, processor, conversation.runs)


def written_plain(text: Text, processor: ModelProcessor) -> tuple[PlainText, MediaSpans, list[Note]]:
    """Write plain text with media as the model's processor does; errors as of `expanded`."""
    with _read(processor, text.media, text.place) as (read, media, notes):
        made = processor.plain(text.prompt, text.places, text.completion, read, text.place)
    border = len(made.prompt)
    runs: list[Run] = [(0, border, 0), (border, border + len(made.completion), 1)]
    return made, MediaSpans(text.place, tuple(media), made.spans, made.ids, processor, runs, ("prompt", "completion")), notes


@contextmanager
def _read(processor: ModelProcessor, media: Sequence[Media], place: str) -> Iterator[tuple[list[Any], list[Media], list[Note]]]:
    """Decode media inside the block, with what is lost of them."""
    read: list[Any] = []
    found: list[Media] = []
    notes: list[Note] = []
    try:
        for medium in media:
            decoded, known = processor.read(medium, place, lost := [])
            read.append(decoded)
            notes += [Note(f"lossy_{medium.kind}", medium.field, what) for what in lost]
            found.append(known)
        yield read, found, notes
    finally:
        close(read)
