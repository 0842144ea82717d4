"""A sample to the conversations or texts in it, and what encoding noted to the one of them that it is about."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from forge_data.findings._finding import WARN, Finding
from forge_data.findings._rules import Where, found
from forge_data.formats._samples import Chat, Note, Preference, Sample, Unpaired
from forge_data.linting._fields import field_of

_INDEX = re.compile(r"messages\[(\d+)\]\.?(.*)")


class Side(NamedTuple):
    """A conversation or text of a sample."""

    answer: str
    """The field of its answer."""
    sample: Sample
    second: bool = False
    """It shares its prompt with one that was looked at."""
    wanted: bool = True
    """The model is to learn it, not to turn away from it."""


def sides(sample: Sample) -> tuple[Side, ...]:
    """What there is to look at: one conversation or text, or the two of a preference."""
    match sample:
        case Preference(chosen=chosen, rejected=rejected):
            return Side("chosen", chosen), Side("rejected", rejected, second=True, wanted=False)
        case Unpaired(answer=answer, desirable=desirable):
            return (Side("completion", answer, wanted=desirable),)
        case _:
            return (Side("completion", sample),)


def noted(where: Where, fields: Mapping[str, Any], its_sides: Sequence[Side], notes: Sequence[Note]) -> Iterator[Finding]:
    """What encoding saw, under the row's own name of the field, and as grave as the turn that it is about."""
    told: set[tuple[str, str]] = set()
    for note in notes:
        at = _INDEX.fullmatch(note.field)
        chats = [side for side in its_sides if isinstance(side.sample, Chat)]
        if at is None or not chats:
            yield found(note.rule, where, note.field, note.what)
            continue
        index, part = int(at[1]), at[2]
        # Both sides of a preference are noted alike, chosen first.
        first = chats[0]
        again = (note.rule, note.field) in told
        told.add((note.rule, note.field))
        side = chats[-1] if again or not _has(first.sample, index, part) else first
        if again and index < _messages(first.sample).first_completion:
            continue
        yield _turn_noted(where, fields, side, note, index, part)


def _turn_noted(where: Where, fields: Mapping[str, Any], side: Side, note: Note, index: int, part: str) -> Finding:
    chat = _messages(side.sample)
    last = max((at for at, message in enumerate(chat.messages) if message["role"] == "assistant"), default=index)
    earlier = note.rule == "reasoning_dropped" and index != last
    severity = WARN if earlier or not side.wanted else None
    return found(note.rule, where, field_of(fields, chat, index, part, side.answer), note.what, severity=severity)


def _messages(sample: Sample) -> Chat:
    assert isinstance(sample, Chat)
    return sample


def _has(sample: Sample, index: int, part: str) -> bool:
    """Whether a conversation has what a note is about."""
    messages = _messages(sample).messages
    return index < len(messages) and (not part or bool(messages[index].get(part)))
