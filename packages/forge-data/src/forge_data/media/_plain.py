"""Prompt and completion with media → both as the model's processor writes and tokenizes.

Most processors are given one text. PaliGemma's is given prompt and completion (`suffix`), writes BOS behind the images and a
line break behind the prompt, and tokenizes the two apart.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_data._errors import DataError, TokenizerError
from forge_data._media import MANY, ONE
from forge_data.media._expanded import PlainText
from forge_data.media._video import kind_of


def write_plain(
    processor: Any, prompt: str, places: Sequence[int], completion: str, media: Sequence[Any], place: str
) -> PlainText:
    """Write plain text with media as `processor(text=..., images=...)` does.

    Arguments are those of `ModelProcessor.plain`, and that processor.

    Raises:
        DataError: a text has a placeholder in it, or the processor refuses the row.
        TokenizerError: the processor does not say what it writes for a medium.
    """
    for kind, placeholder in processor.placeholders.items():
        for field, text in (("prompt", prompt), ("completion", completion)):
            if placeholder in text:
                raise DataError(
                    f"{place}: the {field} has {placeholder!r} in its text, which stands for {ONE[kind]} of this model; "
                    f"{MANY[kind]} are given beside it, so take it out of the text"
                )
    asked, before = "", 0
    for at, medium in zip(places, media, strict=True):
        asked += prompt[before:at] + processor.placeholders[kind_of(medium)]
        before = at
    asked += prompt[before:]
    if processor.takes_suffix:
        return _with_suffix(processor, asked, completion, media, place)
    expanded = processor.expand(asked + completion, media, place, add_special_tokens=True)
    written, spans, before = "", list[tuple[int, int]](), 0
    for start, stop, text in expanded.replacements:
        written += asked[before:start]
        spans.append((len(written), len(written) + len(text)))
        written, before = written + text, stop
    return PlainText(written + asked[before:], completion, apart=False, spans=spans, ids=expanded.ids)


def _with_suffix(processor: Any, asked: str, completion: str, media: Sequence[Any], place: str) -> PlainText:
    options: dict[str, Any] = {"suffix": [completion]} if completion else {}
    recorder, made = processor.recorded(place, asked, media, return_text_replacement_offsets=True, **options)
    offsets = made.get("text_replacement_offsets") or [[]]
    spans = [(int(each["new_span"][0]), int(each["new_span"][1])) for each in offsets[0]]
    if len(spans) != len(media):
        raise TokenizerError(
            f"{place}: {processor.name} does not say what it writes in place of an image (return_text_replacement_offsets), so "
            "rows with it of this model cannot be trained here"
        )
    ids = np.asarray(made["input_ids"][0], dtype=np.int32)
    return PlainText(recorder.written, recorder.pair, apart=True, spans=spans, ids=ids)
