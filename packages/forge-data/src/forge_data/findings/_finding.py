"""A finding of the lint: one problem in one place, with severity and remedy."""

import attrs

from forge_data._errors import printable

STOP = "stop"
"""The model would learn something false, or an evaluation would be misleading."""
WARN = "warn"
"""Worth a look; training on it is sound."""


@attrs.frozen
class Finding:
    """One problem in one place.

    >>> print(Finding("empty_turn", STOP, "train.jsonl", 7, "messages[1].content", "the answer is empty", "take the row out"))
    train.jsonl:7 messages[1].content: the answer is empty; take the row out
    """

    rule: str
    """A name of `RULES`."""
    severity: str
    """`stop` or `warn`."""
    file: str
    """Source as messages name it, such as `train.jsonl`."""
    row: int | None
    """Row of the source, from 1; None for what concerns the whole source."""
    field: str
    """Field, such as `messages[3].content`; empty for the whole row."""
    what: str
    """What was found."""
    fix: str
    """What to do."""

    place: str = attrs.field(default=attrs.Factory(lambda self: _place(self.file, self.row), takes_self=True))
    """`train.jsonl:417`, `train.json[416]`, or the file alone, as in every other message."""

    texts: tuple[str, str] | None = attrs.field(default=None, converter=attrs.converters.optional(tuple))
    """Two texts to be seen side by side: as the row is learned, and as the model will be asked."""

    def __str__(self) -> str:
        return printable(f"{' '.join(filter(None, (self.place, self.field)))}: {self.what}; {self.fix}")


def _place(file: str, row: int | None) -> str:
    return file if row is None else f"{file}:{row}"
