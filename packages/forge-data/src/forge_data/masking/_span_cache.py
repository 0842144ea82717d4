"""One conversation that was traced to where the contents of all others of the same roles stand, and what is learned of them.

This holds for templates that never look at what messages say (`_trace_opaque`): those write the same words of their own around
any contents. The text itself is always the tokenizer's, and has to be these words and contents to the character.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import attrs

from forge_data.chat_template._header import Renderer
from forge_data.chat_template._template import Written
from forge_data.chat_template._trace import Run
from forge_data.formats._samples import Chat
from forge_data.masking._loss_mask import Span

_PLAIN = {"role", "content"}
_TRIES = 3
"""Conversations that are looked at for one skeleton: of the first one more has to be asked than of others."""
# What is kept is small: more turns are rare, and so is what repeats among them.
_MOST_TURNS = 64
_MOST_SKELETONS = 1024

_Key = tuple[tuple[str, ...], tuple[str, ...]]
"""The roles, and what is learned of each message."""
_Place = tuple[int, int]
"""(contents before it, characters of the template before it): a place in a text whose contents have any length."""


class Found(NamedTuple):
    """What is known of a conversation without tracing it."""

    spans: list[Span]
    runs: list[Run]


@attrs.frozen
class _Skeleton:
    """What conversations of the same roles have in common."""

    words: list[str]
    """What the template writes, and an empty string for every content between."""
    spans: list[list[_Place]]
    runs: list[tuple[_Place, _Place, int]]

    def fits(self, contents: list[str], text: str) -> bool:
        """Whether a text is these words and contents."""
        woven = self.words.copy()
        woven[1::2] = contents
        return "".join(woven) == text

    def found(self, contents: list[str]) -> Found:
        """The spans and runs of a conversation with these contents."""
        before = [0, *accumulate(map(len, contents))]
        spans = [Span(*[before[said] + own for said, own in places]) for places in self.spans]
        return Found(spans, [(before[a] + start, before[b] + stop, owner) for (a, start), (b, stop), owner in self.runs])


class Skeletons:
    """The skeletons of one template, which never looks at contents."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Skeleton | int] = {}

    def find(self, chat: Chat, what: Sequence[str], text: str) -> Found | None:
        """The spans and runs of a conversation; None where it has to be traced."""
        skeleton = self._known.get(_key(chat, what))
        if not isinstance(skeleton, _Skeleton):
            return None
        contents = _contents(chat)
        return skeleton.found(contents) if contents is not None and skeleton.fits(contents, text) else None

    def wanted(self, chat: Chat, what: Sequence[str]) -> bool:
        """Whether there is something to learn from a conversation."""
        tries = self._known.get(_key(chat, what), 0)
        few = len(self._known) < _MOST_SKELETONS and len(chat.messages) <= _MOST_TURNS
        return isinstance(tries, int) and tries < _TRIES and few and _contents(chat) is not None

    def learn(self, chat: Chat, what: Sequence[str], written: Written, found: Found | None) -> None:
        """Keep what a traced conversation shows; `found` is None where more than its trace was needed to know it."""
        skeleton = _skeleton(chat, written, found) if found is not None else None
        key = _key(chat, what)
        tries = self._known.get(key, 0)
        self._known[key] = skeleton or (tries + 1 if isinstance(tries, int) else _TRIES)


def watched(written: Written) -> tuple[Written, Callable[[], bool]]:
    """The same, and whether its template was asked for other texts meanwhile, which no skeleton says anything of."""
    asked: list[None] = []
    native, traced = written.renderer

    def noted(*args: object, **kwargs: object) -> str:
        asked.append(None)
        return native(*args, **kwargs)

    return attrs.evolve(written, renderer=Renderer(noted, traced)), lambda: bool(asked)


def _key(chat: Chat, what: Sequence[str]) -> _Key:
    return tuple([message["role"] for message in chat.messages]), tuple(what)


def _contents(chat: Chat) -> list[str] | None:
    """What the messages say, if it is a string without blanks at its ends, and all that they have."""
    if chat.tools or chat.documents or chat.template_kwargs:
        return None
    contents: list[str] = []
    for message in chat.messages:
        said = message.get("content")
        if message.keys() != _PLAIN or not isinstance(said, str) or not said or said[0].isspace() or said[-1].isspace():
            return None
        contents.append(said)
    return contents


def _skeleton(chat: Chat, written: Written, found: Found) -> _Skeleton | None:
    """What the trace of a conversation says of all others; None where its contents do not stand there once each, in order."""
    trace, contents = written.trace, _contents(chat)
    if contents is None or len(trace.stretches) != len(contents) or trace.stretches[-1][1] > trace.outro():
        return None
    for index, (start, stop, leaf, offset) in enumerate(trace.stretches):
        if (leaf.message, leaf.field, offset, stop - start) != (index, "content", 0, len(contents[index])):
            return None
    borders = [(start, stop) for start, stop, _, _ in trace.stretches]
    ends = [0, *(stop for _, stop in borders)]
    starts = [*(start for start, _ in borders), len(trace.text)]
    words = [""] * (2 * len(contents) + 1)
    words[::2] = [trace.text[end:start] for end, start in zip(ends, starts, strict=True)]
    said = [0, *accumulate(map(len, contents))]

    used = {at for span in found.spans for at in span} | {at for start, stop, _ in found.runs for at in (start, stop)}
    if any(start < at < stop for start, stop in borders for at in used):
        return None

    def place(at: int) -> _Place:
        before = sum(stop <= at for _, stop in borders)
        return before, at - said[before]

    return _Skeleton(
        words,
        [[place(at) for at in span] for span in found.spans],
        [(place(start), place(stop), owner) for start, stop, owner in found.runs],
    )
