"""Row and `train_on` → what is learned of each message."""

import attrs

from forge_data._errors import DataError
from forge_data._values import MESSAGE_ROLES
from forge_data.formats._samples import Chat, Stretches

TURN = "turn"
"""Everything that the model has to write: answer, reasoning and tool calls, through the token that ends the turn."""
CONTENT = "content"
"""The content of the message, and no token of the template."""
SAID = "said"
"""The content of a message of another role, through the token that ends the turn."""
NOTHING = ""


def roles_of(train_on: str) -> frozenset[str]:
    """Return the roles that `train_on` names; none where it is `last`, `completion` or `all`.

    >>> sorted(roles_of("user,assistant")), roles_of("last")
    (['assistant', 'user'], frozenset())
    """
    roles = frozenset(train_on.split(","))
    return roles if roles <= set(MESSAGE_ROLES) else frozenset()


def learned_parts(chat: Chat, train_on: str) -> list[str]:
    """Return `TURN`, `SAID`, `CONTENT` or `NOTHING` for each message.

    `all` is not decided here: every token is learned, whoever wrote it.

    Raises:
        DataError: the row has no completion, or has `unmask`, `train: false` or `train_detail` where `train_on` contradicts it.
    """
    if train_on == "completion" and not chat.first_completion:
        raise DataError(
            f"{chat.place}: `train_on` is 'completion', and the row is a conversation without prompt and completion; use last "
            "or assistant, or give the row as prompt and completion (lists of messages)"
        )
    if chat.unmask and train_on not in ("assistant", "all"):
        raise DataError(
            f"{chat.place}: the row has unmask, which learns every message but the system's, and `train_on` is {train_on!r}; "
            "take out one of the two"
        )
    if train_on == "all" and not all(chat.trains or ()):
        index = (chat.trains or ()).index(False)
        raise DataError(
            f"{chat.place}: message {index} is marked as not to be trained, and `train_on` is 'all'; take out one of the two"
        )
    detailed = next((index for index, stretches in chat.asks.items() if stretches is not None), None)
    if train_on == "all" and detailed is not None:
        raise DataError(
            f"{chat.place}: message {detailed} says of stretches of its text whether they are learned, and `train_on` is "
            "'all'; take out one of the two"
        )
    what, roles = _without_asking(chat, train_on), [message["role"] for message in chat.messages]
    for index, stretches in chat.asks.items():
        # What is said of a message wins over `train_on`; stretches of which none is learned only take away.
        if not what[index] and (stretches is None or stretches.learned):
            what[index] = TURN if roles[index] == "assistant" else SAID
    return [part if trains else NOTHING for part, trains in zip(what, chat.trains or [True] * len(what), strict=True)]


def with_stretches(chat: Chat, train_on: str) -> Chat:
    """Settle whether stretches that say nothing are learned: where their message is."""
    if not any(stretches is not None and stretches.as_message for stretches in chat.asks.values()):
        return chat
    what = _without_asking(chat, train_on)
    return attrs.evolve(
        chat,
        asks={
            index: stretches
            if stretches is None
            else Stretches((*stretches.learned, *stretches.as_message) if what[index] else stretches.learned)
            for index, stretches in chat.asks.items()
        },
    )


def _without_asking(chat: Chat, train_on: str) -> list[str]:
    """Return what `train_on` and `unmask` have learned of each message, without `asks`."""
    roles = [message["role"] for message in chat.messages]
    answers = [index for index in range(chat.first_completion, len(roles)) if roles[index] == "assistant"]
    what = [NOTHING] * len(roles)
    named = roles_of(train_on)
    for index in answers[-1:] if train_on == "last" else answers if "assistant" in named or not named else ():
        what[index] = TURN
    for index, role in enumerate(roles):
        if role in named and role != "assistant":
            what[index] = SAID
    if chat.unmask:
        what = [NOTHING if role == "system" else TURN if role == "assistant" else CONTENT for role in roles]
    return what


def answer_alone(chat: Chat) -> Chat:
    """Return an answer of a preference without `train: true`: the answer is learned, whole.

    Raises:
        DataError: a message of another role asks to be learned, or a message only in part.
    """
    for index, stretches in chat.asks.items():
        if stretches is not None or chat.messages[index]["role"] != "assistant":
            what = "train: true" if stretches is None else "which stretches of its text are learned"
            raise DataError(
                f"{chat.place}: message {index} (role {chat.messages[index]['role']}) says {what}, and of a preference or a "
                "rated answer the answer alone is learned, all of it; take that out"
            )
    return attrs.evolve(chat, asks={}) if chat.asks else chat
