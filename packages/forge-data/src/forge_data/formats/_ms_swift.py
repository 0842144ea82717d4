"""Row of ms-swift (`query` and `response`, or what it calls so) → row of messages."""

from typing import Any

from forge_data._errors import DataError
from forge_data._values import describe, from_json, string
from forge_data.formats import _alpaca, _sharegpt
from forge_data.formats._chat import MEDIA_FIELDS, TEMPLATE_FIELDS
from forge_data.formats._format import Fields, Format, message_field
from forge_data.formats._rated import REJECTED, rated

_SYSTEM = ("system", "system_prompt")
_QUERY = ("query", "prompt", "input", "instruction", "question", "problem")
_RESPONSE = tuple("response answer output targets target answer_key answers solution text completion content".split())
_CONVERSATIONS = ("messages", "conversations", "conversation")
_PAIR = ({"human", "assistant"}, {"user", "assistant"}, {"human", "gpt"}, {"human", "bot"}, {"user", "gpt"}, {"user", "bot"})
"""Fields of a turn that is a question with its answer."""
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "function_call": "tool_call",
    **dict.fromkeys(("function_response", "observation", "observations"), "tool_response"),
}
"""Roles of messages that ms-swift reads as others."""
_LAST_ASKED = ("user", "human", "tool")
"""Roles behind the last of which a rejected answer stands."""


def ms_swift(place: str, fields: Fields) -> Fields:
    """Rewrite a row as messages, by ms-swift's own rules.

    Instruction and input are joined by a new line. A field counts as query or response where no other one of those names is
    there, or where it is called so. A system prompt in a field of its own is left out beside one in the conversation.

    Raises:
        DataError: a conversation, a history or a text that cannot be read.
    """
    return {"messages": messages_of(place, fields), **{name: fields[name] for name in _KEPT if name in fields}}


_KEPT = (*TEMPLATE_FIELDS, *MEDIA_FIELDS)


def messages_of(place: str, fields: Fields) -> list[Any]:
    """Return the messages of a row, which are not checked yet; errors as `ms_swift`."""
    system, nulls = _named(fields, _SYSTEM), getattr(fields, "nulls", ())
    said = [] if system is None else [{"role": "system", "content": string(place, system, fields[system])}]
    listed = next((name for name in _CONVERSATIONS if name in fields), None)
    if listed is not None:
        turns = _turns(place, listed, from_json(fields[listed]))
        return turns if _is_system(turns[0]) else [*said, *turns]
    response = _named(fields, _RESPONSE)
    if "instruction" in fields and "input" in fields:
        response = "output" if "output" in fields else response
        asked = {**fields, "history": None, "system": None}
        question = _alpaca.question(place, asked, between="\n").messages[-1]["content"]
    else:
        query = _named(fields, _QUERY)
        question = None if query is None else string(place, query, fields[query])
    null = None if question is not None or response is None else next((name for name in _QUERY if name in nulls), None)
    if null is not None:
        raise DataError(
            f"{place}: field {null} is null, and {response} would be learned without a question; give one, leave {null} out to "
            "learn it so, or take the row out"
        )
    answer = None if response is None else fields[response]
    if isinstance(answer, list) and answer:
        answer = answer[0]  # the first of several answers, as there
    pairs = _alpaca.history_of(place, fields.get("history"))
    last = [{"role": "user", "content": question}] if question is not None else []
    last += [{"role": "assistant", "content": string(place, response, answer)}] if response is not None else []
    return [*said, *pairs, *last]


def pair_of(place: str, fields: Fields) -> tuple[Fields, Fields, int | None]:
    """Make two rows of messages of one that has a rejected answer.

    Beside them is the number of messages that both begin with. The preferred answer is what follows the last message of the
    user or a tool, and `rejected_response` stands in its place. `rejected_messages` is a whole conversation: there the number
    is None.

    Raises:
        DataError: no conversation, or a rejected answer in which somebody else speaks.
    """
    chosen = messages_of(place, fields)
    kept = {name: fields[name] for name in _KEPT if name in fields}
    media = {name.removeprefix("rejected_"): fields[name] for name in REJECTED if name in fields and name[9:] in MEDIA_FIELDS}
    other = kept | media
    if "tools" in fields and fields.get("rejected_tools"):
        other["tools"] = fields["rejected_tools"]
    if "rejected_messages" in fields:
        rejected = _turns(place, "rejected_messages", from_json(fields["rejected_messages"]))
        if _named(fields, _SYSTEM) and _is_system(chosen[0]) and not _is_system(rejected[0]):
            rejected = [chosen[0], *rejected]
        return {"messages": chosen, **kept}, {"messages": rejected, **other}, None
    roles = [each.get("role") if isinstance(each, dict) else None for each in chosen]
    before = max((at + 1 for at, role in enumerate(roles) if role in _LAST_ASKED), default=0)
    if "rejected_response" not in fields:
        return {"messages": chosen, **kept}, {"messages": chosen, **other}, before
    given = fields["rejected_response"]
    answers = [{"role": "assistant", "content": given}] if isinstance(given, str) else from_json(given)
    if not isinstance(answers, list) or not answers or any(_asks(each) for each in answers):
        raise DataError(
            f"{place}: field rejected_response is {describe(given)}; it must be text, or a list of messages in which no user "
            "speaks"
        )
    return {"messages": chosen, **kept}, {"messages": [*chosen[:before], *answers], **other}, before


def _is_system(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "system"


def _asks(message: object) -> bool:
    return not isinstance(message, dict) or message.get("role") == "user"


def _turns(place: str, name: str, value: object) -> list[Any]:
    """Return a conversation, whose turns may be pairs of question and answer, as messages."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: field {name} is {describe(value)}; it must be a list of messages")
    made = list[Any]()
    for index, turn in enumerate(value):
        keys = set(turn) if isinstance(turn, dict) else set()
        pair = next((each for each in _PAIR if each <= keys), None)
        if pair is not None:
            (asked,) = pair & {"human", "user"}
            (answered,) = pair - {asked}
            for role, key in (("user", asked), ("assistant", answered)):
                made.append({"role": role, "content": string(place, f"{name}[{index}].{key}", turn[key])})
        elif "from" in keys:
            made.append(_sharegpt.turn_message(place, f"{name}[{index}]", turn))
        elif isinstance(turn, dict) and isinstance(turn.get("role"), str):
            made.append(turn | {"role": _ROLES.get(turn["role"].replace("-", "_"), turn["role"])})
        else:
            made.append(turn)
    return made


def _named(fields: Fields, names: tuple[str, ...]) -> str | None:
    """Return the field of one of these names: of the first, or of the only one there."""
    given = [name for name in names if name in fields]
    return given[0] if given and (len(given) == 1 or given[0] == names[0]) else None


def field_of(fields: Fields, index: int, part: str, answer: str) -> str:
    """Name the field of a message."""
    listed = next((name for name in _CONVERSATIONS if name in fields), None)
    system = _named(fields, _SYSTEM)
    if answer == "rejected" and "rejected_messages" in fields:
        return message_field("rejected_messages", index, part)
    value = from_json(fields[listed]) if listed is not None else None
    first = value[0] if isinstance(value, list) and value else None
    if system is not None and not _is_system(first):
        if index == 0:
            return system
        index -= 1
    if listed is not None and isinstance(value, list):
        if answer == "rejected" and "rejected_response" in fields:
            roles = [each.get("role") if isinstance(each, dict) else None for each in value]
            if index > max((at for at, role in enumerate(roles) if role in _LAST_ASKED), default=-1):
                return "rejected_response"
        return message_field(listed, index, part)
    history = from_json(fields.get("history"))
    pairs = len(history) if isinstance(history, list) else 0
    if index < 2 * pairs:
        return f"history[{index // 2}][{index % 2}]"
    if index == 2 * pairs:
        return _named(fields, _QUERY) or "instruction"
    return "rejected_response" if answer == "rejected" else _named(fields, _RESPONSE) or "response"


def _has_both(row: Fields) -> bool:
    return "query" in row and "response" in row


MS_SWIFT = Format(
    needs="query, response",
    matches=lambda row: _has_both(row) and rated(row) is None,
    convert=ms_swift,
    field_of=field_of,
    reads=_KEPT,
    # Chosen by name, it reads every form that rows have there.
    chosen=lambda row: (
        any(name in row for name in _CONVERSATIONS)
        or ("instruction" in row and "input" in row)
        or any(_named(row, names) is not None for names in (_QUERY, _RESPONSE))
    ),
)
"""ms-swift's rows of a question and its answer; chosen by name, all that it reads."""
