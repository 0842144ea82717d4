"""Conversation without a system message, and a text → the conversation with that first."""

import attrs

from forge_data.formats._format import FieldOf, Fields
from forge_data.formats._samples import Chat, Preference, Sample, Unpaired

ADDED = "with_system_prompt"
OWN = "with_own_system_message"
"""Forms of the accounting: rows that were given the message, and those that had one."""
_ROLES = ("system", "developer")


def with_system_prompt(chat: Chat, text: str | None) -> Chat:
    """Put a system message first, unless the conversation has one of its own."""
    if text is None or _has_own(chat):
        return chat
    return attrs.evolve(
        chat,
        messages=[{"role": "system", "content": text}, *chat.messages],
        # 0 is a conversation without a prompt of its own, in which every turn of the assistant may be learned.
        first_completion=chat.first_completion and chat.first_completion + 1,
        trains=None if chat.trains is None else (True, *chat.trains),
        weights=None if chat.weights is None else (1.0, *chat.weights),
        asks={index + 1: ranges for index, ranges in chat.asks.items()},
        system_added=True,
    )


def sample_with_system_prompt(sample: Sample, text: str | None) -> Sample:
    """Put a system message first in each conversation of a sample; text stays as it is."""
    match sample:
        case Chat():
            return with_system_prompt(sample, text)
        case Preference(chosen=Chat() as chosen, rejected=Chat() as rejected):
            both = with_system_prompt(chosen, text), with_system_prompt(rejected, text)
            return attrs.evolve(sample, chosen=both[0], rejected=both[1])
        case Unpaired(answer=Chat() as answer):
            return attrs.evolve(sample, answer=with_system_prompt(answer, text))
    return sample


def system_form(sample: Sample) -> frozenset[str]:
    """Return the accounting's form of whose system message a sample has; none of text."""
    chat = _chat_of(sample)
    return frozenset() if chat is None else frozenset({ADDED if chat.system_added else OWN})


def field_of_sample(sample: Sample, field_of: FieldOf) -> FieldOf:
    """Name fields by the row's own messages, whether or not one was put before them."""
    chat = _chat_of(sample)
    if chat is None or not chat.system_added:
        return field_of

    def moved(fields: Fields, index: int, part: str, answer: str) -> str:
        return field_of(fields, index - 1, part, answer) if index else "system_prompt"

    return moved


def _chat_of(sample: Sample) -> Chat | None:
    """Return the conversation of a sample; both sides of a preference begin alike."""
    found = sample.chosen if isinstance(sample, Preference) else sample.answer if isinstance(sample, Unpaired) else sample
    return found if isinstance(found, Chat) else None


def _has_own(chat: Chat) -> bool:
    return any(message["role"] in _ROLES for message in chat.messages)
