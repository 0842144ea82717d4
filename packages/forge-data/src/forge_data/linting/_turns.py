"""Conversation → findings about the order and content of its turns."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from forge_data.findings._finding import STOP, WARN, Finding
from forge_data.findings._rules import Where, found
from forge_data.formats._format import FieldOf, Fields
from forge_data.formats._messages import REASONING, has_media, text_of
from forge_data.formats._samples import Chat, Message
from forge_data.masking._train_on import roles_of

_SYSTEM_ROLES = ("system", "developer")
# An answer that begins with its own role, or continues with a turn of the user: text cut from a transcript.
_OWN_LABEL = re.compile(r"\s*(?:#{1,4} *)?(?:Assistant|ASSISTANT|AI|Bot|GPT|Model|Response) *:(?!:)")
_NEXT_TURN = re.compile(r"\n(?:#{1,4} *)?(?:User|USER|Human|HUMAN) *:\s")


class ChatView(NamedTuple):
    """A conversation as the rules see it."""

    where: Where
    fields: Fields
    chat: Chat
    answer: str
    """Field of the answer, for `field_of`."""
    first: int
    """First message to lint: the prompt of a preference is linted once."""
    wanted: bool
    """False for an answer that the model is to avoid; what is wrong in it stops nothing."""
    learned: tuple[bool, ...]
    """One per message: whether it is a turn that is learned."""
    field_of: FieldOf
    """How the row's format names fields."""

    def field(self, index: int, part: str = "content") -> str:
        """Name the field of the row that a part of a message came from."""
        return self.field_of(self.fields, index, part, self.answer)

    def severity(self, index: int) -> str | None:
        """Return None (the rule's own severity) where the message is learned, else WARN."""
        return None if self.wanted and self.learned[index] else WARN


def learned_turns(chat: Chat, train_on: str) -> tuple[bool, ...]:
    """Tell, for each message, whether it is a turn that is learned."""
    trains = chat.trains or (True,) * len(chat.messages)
    turns = [
        message["role"] == "assistant" and index >= chat.first_completion and trains[index]
        for index, message in enumerate(chat.messages)
    ]
    named = roles_of(train_on) or {"assistant"}
    for index, message in enumerate(chat.messages):
        if message["role"] != "assistant" or "assistant" not in named:
            turns[index] = message["role"] in named and trains[index]
    if train_on == "last" and True in turns:
        last = max(index for index, message in enumerate(chat.messages) if message["role"] == "assistant")
        turns = [learned and index == last for index, learned in enumerate(turns)]
    for index, stretches in chat.asks.items():
        turns[index] = trains[index] and (turns[index] or stretches is None or bool(stretches.learned))
    return tuple(turns)


def turn_findings(view: ChatView) -> Iterator[Finding]:
    """Find empty turns, turns out of order, reasoning that never ends, role labels in answers."""
    messages = view.chat.messages
    for index in range(view.first, len(messages)):
        message = messages[index]
        content = text_of(message)
        if not has_media(message) and (not content or content.isspace()):
            yield from _empty(view, index)
        elif message["role"] == "assistant":
            yield from _answer(view, index, content)
        yield from _order(view, index)
    if view.first < len(messages) and messages[-1]["role"] != "assistant" and any(view.learned) and not view.learned[-1]:
        what = f"the conversation ends with a message of the role {messages[-1]['role']}"
        yield found("untrained_last_turn", view.where, view.field(len(messages) - 1, ""), what)


def _empty(view: ChatView, index: int) -> Iterator[Finding]:
    message = view.chat.messages[index]
    # A call needs no text, and a tool may have nothing to return.
    if message.get("tool_calls") or message["role"] == "tool":
        return
    severity = WARN
    if any(message.get(name) for name in REASONING):
        what = "the turn has reasoning and no answer"
    else:
        what = f"the {message['role']}'s turn is empty"
        answers = [each for each, learned in zip(view.chat.messages, view.learned, strict=True) if learned]
        # One empty turn may be meant; a row of empty answers teaches to answer nothing.
        if view.wanted and view.learned[index] and not any(_has_content(answer) for answer in answers):
            what, severity = f"{what}, and so is every answer of the row", STOP
    yield found("empty_turn", view.where, view.field(index), what, severity=severity)


def _has_content(answer: Message) -> bool:
    return bool(text_of(answer).strip() or answer.get("tool_calls"))


def _answer(view: ChatView, index: int, content: str) -> Iterator[Finding]:
    if "<think>" in content and content.lstrip().startswith("<think>") and "</think>" not in content:
        what = "the answer opens <think> and never closes it"
        yield found("unclosed_reasoning", view.where, view.field(index), what, severity=view.severity(index))
    label = _OWN_LABEL.match(content) or (_NEXT_TURN.search(content) if ":" in content else None)
    if label:
        yield found("role_label_in_text", view.where, view.field(index), f"the answer holds the label {label[0].strip()!r}")


def _order(view: ChatView, index: int) -> Iterator[Finding]:
    what = _out_of_order(view.chat.messages[index], view.chat.messages[index - 1] if index else None)
    if what:
        yield found("role_order", view.where, view.field(index, "role"), what)


def _out_of_order(message: Message, before: Message | None) -> str | None:
    role = message["role"]
    if before is None:
        return "the conversation begins with the assistant" if role == "assistant" else None
    if role in _SYSTEM_ROLES:
        return None if before["role"] in _SYSTEM_ROLES else f"a {role} message after the conversation has begun"
    if role == before["role"] != "tool" and not before.get("tool_calls"):
        return f"two messages of the role {role}, one after the other"
    return "the assistant speaks before any user" if role == "assistant" and before["role"] in _SYSTEM_ROLES else None


def texts_of(message: Message) -> Iterator[tuple[str, str]]:
    """List (part, text) of all text in a message."""
    content = message.get("content")
    if isinstance(content, list):
        yield from (("content", part["text"]) for part in content if part["type"] == "text")
    for part in ("content", *REASONING):
        text = message.get(part)
        if isinstance(text, str) and text:
            yield part, text
