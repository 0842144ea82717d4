"""Prepared prompts on disk: their tokens, their text, and the other fields of their rows."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self, overload

import attrs
import numpy as np

from forge_data._media import Media
from forge_data.formats._chat import MEDIA_FIELDS
from forge_data.store._base import Store
from forge_data.store._media import media_at

if TYPE_CHECKING:
    from numpy.typing import NDArray


@attrs.frozen(eq=False)
class Prompt:
    """What a model is asked; `len(prompt)` is S."""

    input_ids: "NDArray[np.int32]"
    """int32[S], tokens that the model continues from: for messages with the chat template's generation prompt. Of a query with
    its documents those of all texts, one after another, of which the column `lengths` has the number of each."""

    prompt: str | list[dict[str, Any]]
    """The same as the row has it: text, or messages as the chat template gets them. A part that is an image has it beside its
    type, `{"type": "image", "image": ...}`: the absolute path of its file, or its bytes where the row holds them; of a video
    that is a list of frames, a list of these. Audio and videos likewise."""

    columns: dict[str, Any]
    """Every further field of the row, as a JSON value; one that is null counts as absent. The column `images` or
    `image` has its images as `prompt` has them, in a list where the row has one."""

    media: tuple[Media, ...] = ()
    """Images of the prompt, in order."""

    text: str | None = None
    """Of messages with images, what the chat template wrote: one placeholder stands for each."""

    def __len__(self) -> int:
        return len(self.input_ids)


class PromptStore(Store):
    """N prompts on disk; `store[i]` is a `Prompt`, `len(store)` is N.

    Open one with `PromptStore.open(directory)`; `forge_data.prepare_prompts` makes one. `store[10:20]`, `select`
    and `split` give views.
    """

    _of_prompts = True
    _plural = "prompts"

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Prompt | Self:
        if isinstance(index, slice):
            return self._slice(index)
        at = self._stored_index(index)
        bounds, record = self._bounds, self._record(at)
        media = media_at(self._arrays, at)
        if media:
            _put_media(record, media)
        return Prompt(self._ids[bounds[at] : bounds[at + 1]], record["prompt"], record["columns"], media, record.get("text"))

    def columns(self, index: int) -> dict[str, Any]:
        """Return the columns of a prompt, without images: nothing of these is read."""
        return dict(self._record(self._stored_index(index))["columns"])

    def first_with(self, text: str) -> int | None:
        """Return the first prompt without media that says a text; None where none does.

        Of a query with documents each text counts.
        """
        written, counts = json.dumps(text)[1:-1].encode(), self.media_counts[:, 0]
        for index in np.flatnonzero(counts == 0).tolist():
            at = self._stored_index(index)
            if written in self._record_bytes(at) and any(text in each for each in _texts(self._record(at))):
                return int(index)
        return None

    def _record(self, at: int) -> dict[str, Any]:
        return json.loads(self._record_bytes(at))

    def _record_bytes(self, at: int) -> bytes:
        ends = self._arrays["record_offsets.bin"]
        return self._arrays["records.bin"][ends[at] : ends[at + 1]].tobytes()

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"PromptStore({str(self.path)!r}, prompts={len(self)}, tokens={int(self.lengths.sum())})"


def _texts(record: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a prompt; of a query its documents' too."""
    for asked in _asked(record):
        contents = [asked] if isinstance(asked, str) else [message.get("content") for message in asked]
        for content in contents:
            parts = content if isinstance(content, list) else [content]
            yield from (part["text"] if isinstance(part, dict) else part for part in parts if _says(part))


def _says(part: Any) -> bool:
    return isinstance(part.get("text") if isinstance(part, dict) else part, str)


def _asked(record: dict[str, Any]) -> list[Any]:
    """Return a prompt, or a query with its documents: each a text or messages."""
    columns = record["columns"]
    return [record["prompt"], *([columns["positive"], *columns["negatives"]] if "texts" in record else [])]


def _put_media(record: dict[str, Any], media: tuple[Media, ...]) -> None:
    """Put images into the messages of a record, and into the columns that they are from."""
    given = [medium.given for medium in media]
    messages = [message for text in _asked(record) if isinstance(text, list) for message in text]
    parts = (part for message in messages if isinstance(message["content"], list) for part in message["content"])
    for part, value in zip((part for part in parts if part["type"] != "text"), given, strict=False):  # it may be cut
        part[part["type"]] = value
    columns = record["columns"]
    for name in MEDIA_FIELDS:
        found = [value for medium, value in zip(media, given, strict=True) if medium.field.partition("[")[0] == name]
        if found:
            one = any(medium.field == name for medium in media)
            columns[name] = found[0] if one else found
