"""Prompt of plain text with marks of media, and the row's columns → the text without marks, and where each medium stands."""

import re
from collections.abc import Mapping
from typing import Any

import attrs

from forge_data._errors import DataError
from forge_data._media import MANY, MARKS, Kind, Media
from forge_data._values import counted
from forge_data.formats._chat import given_media
from forge_data.formats._samples import Text


def with_media(place: str, fields: Mapping[str, Any], text: Text) -> Text:
    """Return a text with the media of its row's columns.

    Each stands where its mark (`<image>`, `<video>`, `<audio>`) does in the prompt; without a mark of their kind all stand
    before the prompt.

    Raises:
        DataError: another number of marks than of media, or one in the completion.
    """
    given = {kind: media for kind in MARKS if (media := given_media(place, fields, kind))}
    for kind, media in given.items():
        field = media[0].field.partition("[")[0]
        if MARKS[kind] in text.completion:
            raise DataError(
                f"{place}: field completion holds {MARKS[kind]}, and the row has {MANY[kind]}; what a model writes is text: "
                "put it into the prompt"
            )
        if (marks := text.prompt.count(MARKS[kind])) not in (0, len(media)):
            raise DataError(
                f"{place}: field {field} holds {counted(len(media), MANY[kind])}, and {MARKS[kind]} stands in the prompt "
                f"{counted(marks, 'times')}; give each {kind} its place"
            )
    if not given:
        return text
    pattern = "|".join(re.escape(MARKS[kind]) for kind in given)
    kinds: dict[str, Kind] = {MARKS[kind]: kind for kind in given}
    found = [kinds[mark] for mark in re.findall(pattern, text.prompt)]
    before: list[Media] = [medium for kind, media in given.items() if kind not in found for medium in media]
    following = {kind: iter(media) for kind, media in given.items()}
    places, prompt = [0] * len(before), ""
    for at, part in enumerate(re.split(pattern, text.prompt)):
        places += [len(prompt)] if at else []
        prompt += part
    return attrs.evolve(text, prompt=prompt, media=(*before, *(next(following[kind]) for kind in found)), places=tuple(places))
