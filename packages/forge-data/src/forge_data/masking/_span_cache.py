"""Traced conversation → spans of all others with the same roles, without tracing them.

This holds for templates that never branch on content (`_content_blind`): they write the same text of their own around any
contents. The text itself is always the tokenizer's, and must be this text and these contents to the character.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import attrs

from forge_data.chat_template._header import Renderer
from forge_data.chat_template._template import RenderedChat
from forge_data.chat_template._trace import Run
from forge_data.formats._samples import Chat
from forge_data.masking._loss_mask import Span

_PLAIN = {"role", "content"}
_MAX_TRIES = 3
"""Conversations that are examined for one layout: for the first one, more is asked than for others."""
# Longer conversations are rare, and repeat nothing.
_MAX_TURNS = 64
_MAX_LAYOUTS = 1024

_Key = tuple[tuple[str, ...], tuple[str, ...]]
"""The roles, and what is learned of each message."""
_Place = tuple[int, int]
"""(contents before it, characters of the template before it): a place in a text whose contents have any length."""


class Spans(NamedTuple):
    """What masking needs to know of a conversation."""

    spans: list[Span]
    runs: list[Run]


@attrs.frozen
class _Layout:
    """What the texts of conversations with the same roles have in common."""

    literals: list[str]
    """Text of the template, and an empty string for every content between."""
    spans: list[list[_Place]]
    runs: list[tuple[_Place, _Place, int]]

    def fits(self, contents: list[str], text: str) -> bool:
        """Tell whether a text is these literals and contents."""
        woven = self.literals.copy()
        woven[1::2] = contents
        return "".join(woven) == text

    def found(self, contents: list[str]) -> Spans:
        """Compute the spans and runs of a conversation with these contents."""
        before = [0, *accumulate(map(len, contents))]
        spans = [Span(*[before[count] + own for count, own in places]) for places in self.spans]
        return Spans(spans, [(before[a] + start, before[b] + stop, owner) for (a, start), (b, stop), owner in self.runs])


class SpanCache:
    """Layouts of one template that never branches on content."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Layout | int] = {}

    def find(self, chat: Chat, what: Sequence[str], text: str) -> Spans | None:
        """Compute the spans and runs of a conversation; None where it must be traced."""
        layout = self._known.get(_key(chat, what))
        if not isinstance(layout, _Layout):
            return None
        contents = _contents(chat)
        return layout.found(contents) if contents is not None and layout.fits(contents, text) else None

    def wanted(self, chat: Chat, what: Sequence[str]) -> bool:
        """Tell whether a conversation can add a layout."""
        tries = self._known.get(_key(chat, what), 0)
        few = len(self._known) < _MAX_LAYOUTS and len(chat.messages) <= _MAX_TURNS
        return isinstance(tries, int) and tries < _MAX_TRIES and few and _contents(chat) is not None

    def learn(self, chat: Chat, what: Sequence[str], rendered: RenderedChat, found: Spans | None) -> None:
        """Keep the layout of a traced conversation.

        `found` is None where its trace alone did not decide its spans.
        """
        layout = _layout(chat, rendered, found) if found is not None else None
        key = _key(chat, what)
        tries = self._known.get(key, 0)
        self._known[key] = layout or (tries + 1 if isinstance(tries, int) else _MAX_TRIES)


def watch_renderer(rendered: RenderedChat) -> tuple[RenderedChat, Callable[[], bool]]:
    """Return the same, and whether its template was asked for other texts since.

    A layout knows nothing of such texts.
    """
    calls: list[None] = []
    native, traced = rendered.renderer

    def native_counted(*args: object, **kwargs: object) -> str:
        calls.append(None)
        return native(*args, **kwargs)

    return attrs.evolve(rendered, renderer=Renderer(native_counted, traced)), lambda: bool(calls)


def _key(chat: Chat, what: Sequence[str]) -> _Key:
    return tuple([message["role"] for message in chat.messages]), tuple(what)


def _contents(chat: Chat) -> list[str] | None:
    """List the contents of messages that hold nothing else; None if any is blank at its ends."""
    if chat.tools or chat.documents or chat.template_kwargs:
        return None
    contents: list[str] = []
    for message in chat.messages:
        content = message.get("content")
        if message.keys() != _PLAIN or not isinstance(content, str) or not content or content != content.strip():
            return None
        contents.append(content)
    return contents


def _layout(chat: Chat, rendered: RenderedChat, found: Spans) -> _Layout | None:
    """Make the layout of a conversation; None unless its contents occur once each, in order."""
    trace, contents = rendered.trace, _contents(chat)
    if contents is None or len(trace.stretches) != len(contents) or trace.stretches[-1][1] > trace.end_of_turns():
        return None
    for index, (start, stop, leaf, offset) in enumerate(trace.stretches):
        if (leaf.message, leaf.field, offset, stop - start) != (index, "content", 0, len(contents[index])):
            return None
    borders = [(start, stop) for start, stop, _, _ in trace.stretches]
    ends = [0, *(stop for _, stop in borders)]
    starts = [*(start for start, _ in borders), len(trace.text)]
    literals = [""] * (2 * len(contents) + 1)
    literals[::2] = [trace.text[end:start] for end, start in zip(ends, starts, strict=True)]
    lengths = [0, *accumulate(map(len, contents))]

    used = {at for span in found.spans for at in span} | {at for start, stop, _ in found.runs for at in (start, stop)}
    if any(start < at < stop for start, stop in borders for at in used):
        return None

    def place(at: int) -> _Place:
        before = sum(stop <= at for _, stop in borders)
        return before, at - lengths[before]

    return _Layout(
        literals,
        [[place(at) for at in span] for span in found.spans],
        [(place(start), place(stop), owner) for start, stop, owner in found.runs],
    )
