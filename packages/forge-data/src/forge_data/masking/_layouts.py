"""Conversation that extends its prompts → layout of all conversations of the same roles.

Proven on symbols in place of contents (`chat_template._symbolic`), so it holds for every content that the proof allows.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from forge_data.chat_template._asked import Asked
from forge_data.chat_template._block import REASONING_TAGS
from forge_data.chat_template._symbolic import Symbols, holds_symbol
from forge_data.chat_template._template import ChatTemplate, RenderedChat
from forge_data.chat_template._trace import Trace
from forge_data.formats._samples import Chat
from forge_data.masking._as_prompted import TurnEnds
from forge_data.masking._frames import Filled, Frame, frame_of
from forge_data.masking._spans import Turns

_MAX_TRIES = 3
"""Conversations of one layout that are examined, where the first ones have contents that the proof does not allow."""
_MAX_LAYOUTS = 1024
# Longer conversations are rare, and repeat nothing.
_MAX_MESSAGES = 64
# Turns with reasoning are asked for with other arguments.
_TAGS = tuple(tag for tags in REASONING_TAGS for tag in tags)

_Key = tuple[tuple[str, ...], tuple[str, ...]]
"""The roles, and what is learned of each message."""


class Layout(NamedTuple):
    """Where the prompts of conversations with the same roles end in their texts."""

    arguments: dict[str, Any]
    """Arguments of the template that the row does not give."""
    absent: tuple[str, ...]
    """Texts that no content may have in it."""
    contents: list[int]
    """The message of each content in the text, in order."""
    ends: dict[int, tuple[int, str]]
    """By learned turn, where its prompt ends: after so many contents, and this text of the template."""
    repeats: bool = False
    """Whether the template writes the same at any time."""

    def prompts(self, trace: Trace) -> dict[int, int] | None:
        """Find the length of each prompt in a text; None where the text is laid out otherwise."""
        stretches = trace.stretches
        if [leaf.message for _, _, leaf, _ in stretches] != self.contents:
            return None
        found = {}
        for index, (before, literal) in self.ends.items():
            at = stretches[before - 1][1] if before else 0
            if not trace.text.startswith(literal, at):
                return None
            found[index] = at + len(literal)
        return found


class _Candidate(NamedTuple):
    """What stands around the contents of a conversation; None where that differs for others."""

    frame: Frame | None
    confirmed: bool
    """Whether another conversation was rendered so too."""


class Layouts:
    """The layouts of one template."""

    def __init__(self, ends: TurnEnds) -> None:
        self._ends = ends
        self._known: dict[_Key, Layout | int] = {}
        self._frames: dict[_Key, _Candidate] = {}

    def find(self, chat: Chat, what: Sequence[str]) -> Layout | None:
        """Return the layout of a conversation; None where its prompts must be rendered."""
        layout = self._known.get(_key(chat, what))
        return layout if isinstance(layout, Layout) and not chat.template_kwargs and _allows(layout.absent, chat) else None

    def frame(self, chat: Chat, what: Sequence[str], rendered: RenderedChat, filled: Filled) -> None:
        """Take the frame of a conversation of a known layout, or compare it with an earlier one."""
        layout, key = self._known[_key(chat, what)], _key(chat, what)
        known, contents = self._frames.get(key), [message["content"] for message in chat.messages]
        assert isinstance(layout, Layout)
        if known is None:
            frame = frame_of(rendered.trace, filled, contents, layout.absent) if layout.repeats else None
            self._frames[key] = _Candidate(frame, confirmed=False)
        elif known.frame is not None and not known.confirmed:
            same = known.frame.fill(contents) == filled
            self._frames[key] = _Candidate(known.frame if same else None, confirmed=same)

    def known_frame(self, chat: Chat, what: Sequence[str]) -> Frame | None:
        """Return a frame that another conversation confirmed."""
        known = self._frames.get(_key(chat, what))
        return known.frame if known is not None and known.confirmed else None

    def learn(
        self,
        chat: Chat,
        what: Sequence[str],
        arguments: dict[str, Any],
        first: dict[str, Any],
        rendered: RenderedChat,
        asked: Mapping[int, Asked],
        turns: Turns,
        template: ChatTemplate,
    ) -> None:
        """Examine a conversation that extends its prompts, unless one of its roles was before.

        Args:
            chat: the conversation, with all arguments of its template.
            what: what is learned of each message.
            arguments: those of its arguments that the row does not give.
            first: those that are tried first.
            rendered: its text.
            asked: each learned turn as the model is asked for it.
            turns: its spans.
            template: what wrote it.
        """
        key = _key(chat, what)
        tries = self._known.get(key, 0)
        if not isinstance(tries, int) or tries >= _MAX_TRIES or len(self._known) >= _MAX_LAYOUTS:
            return
        if len(chat.messages) <= _MAX_MESSAGES and chat.template_kwargs == arguments and _allows(_TAGS, chat):
            found = self._examine(chat, first, rendered, asked, turns, template)
            self._known[key] = (
                tries + 1 if found is None else found._replace(arguments=arguments, repeats=template.repeats(chat))
            )

    def _examine(
        self,
        chat: Chat,
        first: dict[str, Any],
        rendered: RenderedChat,
        asked: Mapping[int, Asked],
        turns: Turns,
        template: ChatTemplate,
    ) -> Layout | None:
        """Make the layout of a conversation; None unless symbols prove it for all of its roles."""
        symbols = Symbols()
        try:
            write = template.symbolic(chat, symbols)
            whole = write(len(chat.messages))
            on_symbols = {index: Asked(write(index, opening=True), write(index + 1)) for index in asked}
            # Where other arguments are taken than those tried first, these must change nothing, whatever the contents.
            write = template.symbolic(attrs.evolve(chat, template_kwargs=first), symbols)
            as_first = all(turn == Asked(write(index, opening=True), write(index + 1)) for index, turn in on_symbols.items())
        except Exception:  # noqa: BLE001 - a template may raise anything, and looks at contents in many ways
            return None
        places = _Places(whole, rendered.trace)
        if not as_first or not places.fit or not _allows(symbols.absent, chat):
            return None
        text = rendered.trace.text
        for index, turn in on_symbols.items():
            span = turns.last[index]
            end = self._ends.learned_end(text, span)
            closed = rendered.marks or self._ends.closes(text[span.content_end : end])
            if not turn.follows or not self._ends.follows(whole[: places.on_symbols(end)], turn, closed=closed):
                return None
        contents = [leaf.message for _, _, leaf, _ in rendered.trace.stretches]
        ends = {index: _end(turn.prompt) for index, turn in on_symbols.items()}
        return Layout({}, (*symbols.absent, *_TAGS), contents, ends)


class _Places:
    """Map of places in a text to places in the same text with symbols for contents."""

    def __init__(self, whole: str, trace: Trace) -> None:
        self._symbols = [at for at, character in enumerate(whole) if holds_symbol(character)]
        self._stops = [stop for _, stop, _, _ in trace.stretches]
        starts = [start for start, _, _, _ in trace.stretches]
        literals = [trace.text[start:stop] for start, stop in zip([0, *self._stops], [*starts, len(trace.text)], strict=True)]
        edges = zip([0, *(at + 1 for at in self._symbols)], [*self._symbols, len(whole)], strict=True)
        self.fit = literals == [whole[start:stop] for start, stop in edges]
        """Whether both are the same text of the template around contents."""

    def on_symbols(self, at: int) -> int:
        """Return the place with symbols of a place that is not within a content."""
        before = bisect_right(self._stops, at)
        return at - self._stops[before - 1] + self._symbols[before - 1] + 1 if before else at


def _end(prompt: str) -> tuple[int, str]:
    symbols = [at for at, character in enumerate(prompt) if holds_symbol(character)]
    return len(symbols), prompt[symbols[-1] + 1 if symbols else 0 :]


def _key(chat: Chat, what: Sequence[str]) -> _Key:
    return tuple([message["role"] for message in chat.messages]), tuple(what)


def _allows(absent: Iterable[str], chat: Chat) -> bool:
    """Check that a proof holds for a conversation."""
    if chat.media or chat.tools or chat.documents or any(len(message) != 2 for message in chat.messages):
        return False
    return allows(absent, [message["content"] for message in chat.messages])


def allows(absent: Iterable[str], contents: Sequence[str]) -> bool:
    """Check that a proof holds for contents: no blanks at their ends, no excluded text."""
    for content in contents:
        if not content or content[0].isspace() or content[-1].isspace():
            return False
    whole = "\0".join(contents)
    return not any(text in whole for text in absent)
