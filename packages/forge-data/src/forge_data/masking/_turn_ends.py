"""Learned turns without an end → the same with the stop token that ends them."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from forge_data.chat_template._header import RefusedError
from forge_data.chat_template._template import RenderedChat
from forge_data.chat_template._trace import Run
from forge_data.masking._as_prompted import TurnEnds
from forge_data.masking._spans import Turns


class Ended(NamedTuple):
    """A text whose learned turns end."""

    text: str
    turns: Turns
    tokens: frozenset[str]
    """Stop tokens that were put to turns."""
    owned: list[Run]
    """Where they are, and the turns that they end, although the next message begins with them."""


class StopTokens:
    """The tokens that stop a model's answers."""

    def __init__(self, tokens: Sequence[str], ends: TurnEnds, *, chosen: bool) -> None:
        """Take the tokens; one that is `chosen` ends the last turn in any case."""
        self._stop = re.compile(r"\s*(" + "|".join(map(re.escape, tokens)) + ")") if tokens else None
        self._last = tokens[0] if chosen else ""
        self._ends = ends

    def end_turns(self, rendered: RenderedChat, turns: Turns) -> Ended:
        """End each learned turn that has no end with the stop token that begins the next message.

        Where no message follows, the token is appended with which a user's message, or the result of a call, would begin. What
        a template marks stays as it is.
        """
        text, tokens, owned = rendered.trace.text, set[str](), list[Run]()
        if self._stop is None or rendered.marks:
            return Ended(text, turns, frozenset(), owned)
        for index, span in list(turns.last.items()):
            if self._ends.closes(text[span.content_end : span.stop]):
                continue
            found = self._stop.match(text, span.stop)
            if found:
                token, end = found[1], found.end()
            elif text[span.stop :].strip() or not (token := self._following(rendered, index)):
                continue
            else:
                text, end = text + token, len(text) + len(token)
            tokens.add(token)
            owned.append((span.stop, end, index))
            ended = span._replace(closing_end=end, stop=end)
            turns.spans[turns.spans.index(span)] = turns.last[index] = ended
            turns.notes[:] = [
                note for note in turns.notes if (note.rule, note.field) != ("untrained_turn_end", f"messages[{index}]")
            ]
        return Ended(text, turns, frozenset(tokens), owned)

    def _following(self, rendered: RenderedChat, index: int) -> str:
        """Return the stop token that would begin the message after a turn; empty if there is none."""
        calls = rendered.messages[index].get("tool_calls")
        following = {"role": "user", "content": "0"}
        if calls:
            following = {"role": "tool", "content": "0", "tool_call_id": str(calls[0].get("id", "0"))}
        try:
            trace = rendered.renderer.traced([*rendered.messages[: index + 1], following])
        except RefusedError:
            return self._last
        body = trace.body(index + 1)
        found = self._stop.match(trace.text, body[0]) if body is not None and self._stop is not None else None
        return found[1] if found else self._last
