"""Sample → the conversations or texts in it, and what encoding noted → findings about them."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forge_data.findings._finding import WARN, Finding
from forge_data.findings._rules import Where, found
from forge_data.formats._format import FieldOf, Fields
from forge_data.formats._samples import Chat, Note, Preference, Sample, Unpaired

_OF_MEDIA = ("lossy_image", "lossy_video", "lossy_audio")
_INDEX = re.compile(r"messages\[(\d+)\]\.?(.*)")


class Side(NamedTuple):
    """A conversation or text of a sample."""

    answer: str
    """Field of the answer: `completion`, `chosen` or `rejected`."""
    sample: Sample
    second: bool = False
    """Whether it shares its prompt with a side that was linted already."""
    wanted: bool = True
    """Whether the model is to learn it, and not to avoid it."""


def sides(sample: Sample) -> tuple[Side, ...]:
    """List the conversations or texts of a sample: one, or the two of a preference."""
    match sample:
        case Preference(chosen=chosen, rejected=rejected):
            return Side("chosen", chosen), Side("rejected", rejected, second=True, wanted=False)
        case Unpaired(answer=answer, desirable=desirable):
            return (Side("completion", answer, wanted=desirable),)
        case _:
            return (Side("completion", sample),)


def note_findings(
    where: Where, fields: Fields, sides: Sequence[Side], notes: Sequence[Note], field_of: FieldOf
) -> Iterator[Finding]:
    """Make findings of the encoder's notes, with the row's field names and the turn's severity."""
    seen: set[tuple[str, str]] = set()
    for note in notes:
        if note.rule in _OF_MEDIA:
            # Its field is the row's own; several samples of the row may have the image.
            if (note.rule, note.field) not in seen:
                yield found(note.rule, where, note.field, note.what)
            seen.add((note.rule, note.field))
            continue
        match = _INDEX.fullmatch(note.field)
        chats = [side for side in sides if isinstance(side.sample, Chat)]
        if match is None or not chats:
            yield found(note.rule, where, note.field, note.what)
            continue
        index, part = int(match[1]), match[2]
        # Both sides of a preference are noted alike, chosen first.
        first = chats[0]
        again = (note.rule, note.field) in seen
        seen.add((note.rule, note.field))
        side = chats[-1] if again or not _has(first.sample, index, part) else first
        if again and index < _chat(first.sample).first_completion:
            continue
        field = field_of(fields, index, part, side.answer)
        yield found(note.rule, where, field, note.what, severity=_severity(side, note, index), texts=note.texts)


def _severity(side: Side, note: Note, index: int) -> str | None:
    """Return WARN for an unwanted answer or an earlier turn; None for the rule's own severity.

    Earlier turns without reasoning are what the model sees when it is used.
    """
    chat = _chat(side.sample)
    last = max((at for at, message in enumerate(chat.messages) if message["role"] == "assistant"), default=index)
    earlier = note.rule == "reasoning_dropped" and index != last
    return WARN if earlier or note.warns or not side.wanted else None


def _chat(sample: Sample) -> Chat:
    assert isinstance(sample, Chat)
    return sample


def _has(sample: Sample, index: int, part: str) -> bool:
    """Tell whether a conversation has what a note is about."""
    messages = _chat(sample).messages
    return index < len(messages) and (not part or bool(messages[index].get(part)))
