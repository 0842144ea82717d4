"""A conversation to what is wrong with the order and the make of its turns."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from forge_data.findings._finding import STOP, WARN, Finding
from forge_data.findings._rules import Where, found
from forge_data.formats._messages import REASONING
from forge_data.formats._samples import Chat, Message
from forge_data.linting._fields import field_of

_SETTING = ("system", "developer")
# An answer that begins with its own role, or goes on with a turn of the user's: text that was cut from a transcript.
_OWN_LABEL = re.compile(r"\s*(?:#{1,4} *)?(?:Assistant|ASSISTANT|AI|Bot|GPT|Model|Response) *:(?!:)")
_NEXT_TURN = re.compile(r"\n(?:#{1,4} *)?(?:User|USER|Human|HUMAN) *:\s")


class View(NamedTuple):
    """A conversation as the rules look at it."""

    where: Where
    fields: Mapping[str, Any]
    chat: Chat
    answer: str
    """The field of the answer, as `field_of` wants it."""
    first: int
    """The first message to look at: a preference's prompt is looked at once."""
    wanted: bool
    """False for an answer that the model is to turn away from; what is wrong in it stops nothing."""
    learned: tuple[bool, ...]
    """One a message: it is an assistant's that is learned."""

    def field(self, index: int, part: str = "content") -> str:
        """Where a part of a message stands in the row."""
        return field_of(self.fields, self.chat, index, part, self.answer)

    def grave(self, index: int) -> str | None:
        """The severity of what is wrong in a message: the rule's own where it is learned from, or a warning."""
        return None if self.wanted and self.learned[index] else WARN


def learned_turns(chat: Chat, train_on: str) -> tuple[bool, ...]:
    """One a message: whether it is an assistant's turn that is learned."""
    trains = chat.trains or (True,) * len(chat.messages)
    ours = [
        message["role"] == "assistant" and index >= chat.first_completion and trains[index]
        for index, message in enumerate(chat.messages)
    ]
    if train_on == "last" and True in ours:
        last = max(index for index, message in enumerate(chat.messages) if message["role"] == "assistant")
        ours = [is_ours and index == last for index, is_ours in enumerate(ours)]
    return tuple(ours)


def turn_findings(view: View) -> Iterator[Finding]:
    """Empty turns, turns out of order, reasoning that never ends, labels of roles in answers."""
    messages = view.chat.messages
    for index in range(view.first, len(messages)):
        message = messages[index]
        content = message.get("content")
        if not content or content.isspace():
            yield from _empty(view, index)
        elif message["role"] == "assistant":
            yield from _answer(view, index, content)
        yield from _order(view, index)
    if view.first < len(messages) and messages[-1]["role"] != "assistant" and any(view.learned):
        what = f"the conversation ends with a message of the role {messages[-1]['role']}"
        yield found("untrained_last_turn", view.where, view.field(len(messages) - 1, ""), what)


def _empty(view: View, index: int) -> Iterator[Finding]:
    message = view.chat.messages[index]
    # A call needs no words, and a tool may well have nothing to say.
    if message.get("tool_calls") or message["role"] == "tool":
        return
    severity = WARN
    if any(message.get(name) for name in REASONING):
        what = "the turn reasons and then says nothing"
    else:
        what = f"the {message['role']}'s turn is empty"
        answers = [each for each, learned in zip(view.chat.messages, view.learned, strict=True) if learned]
        # One silence in a conversation is a matter of taste; a row of nothing else teaches to be silent.
        if view.wanted and view.learned[index] and not any(_says(answer) for answer in answers):
            what, severity = f"{what}, and so is every answer of the row", STOP
    yield found("empty_turn", view.where, view.field(index), what, severity=severity)


def _says(answer: Message) -> bool:
    content = answer.get("content")
    return bool((content and not content.isspace()) or answer.get("tool_calls"))


def _answer(view: View, index: int, content: str) -> Iterator[Finding]:
    if "<think>" in content and content.lstrip().startswith("<think>") and "</think>" not in content:
        what = "the answer opens <think> and never closes it"
        yield found("unclosed_reasoning", view.where, view.field(index), what, severity=view.grave(index))
    label = _OWN_LABEL.match(content) or (_NEXT_TURN.search(content) if ":" in content else None)
    if label:
        yield found("role_label_in_text", view.where, view.field(index), f"the answer holds the label {label[0].strip()!r}")


def _order(view: View, index: int) -> Iterator[Finding]:
    wrong = _out_of_order(view.chat.messages[index], view.chat.messages[index - 1] if index else None)
    if wrong:
        yield found("role_order", view.where, view.field(index, "role"), wrong)


def _out_of_order(message: Message, before: Message | None) -> str | None:
    role = message["role"]
    if before is None:
        return "the conversation begins with the assistant" if role == "assistant" else None
    if role in _SETTING:
        return None if before["role"] in _SETTING else f"a {role} message after the conversation has begun"
    if role == before["role"] != "tool" and not before.get("tool_calls"):
        return f"two messages of the role {role}, one after the other"
    return "the assistant speaks before any user does" if role == "assistant" and before["role"] in _SETTING else None


def texts_of(message: Message) -> Iterator[tuple[str, str]]:
    """(part, text) of all that a message says in words."""
    for part in ("content", *REASONING):
        text = message.get(part)
        if isinstance(text, str) and text:
            yield part, text
