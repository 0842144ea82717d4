"""A list of messages as it stands in a file to one that is known to be sound."""

from forge_data._describe import describe
from forge_data._errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {"role", "content"}


Message = dict[str, str]
"""One turn: role and content."""


def checked_messages(place: str, field: str, value: object) -> list[Message]:
    """The messages of a row, with role and content only.

    Raises:
        DataError: no list, an unknown role, a content that is not a string, or a field that would be passed over.
    """
    if not isinstance(value, list):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be a list of messages")
    if not value and field != "prompt":
        raise DataError(f"{place}: field {field} is an empty list; it must hold at least one message")
    return [_checked(place, f"{field}[{index}]", message) for index, message in enumerate(value)]


def checked_text(place: str, field: str, value: str) -> str:
    """A string that can be encoded.

    Raises:
        DataError: it holds half of a surrogate pair, which no tokenizer accepts.
    """
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: field {field} holds the lone surrogate U+{ord(value[error.start]):04X} at position {error.start}, "
                "half of a character; mend the text where it was cut"
            ) from error
    return value


def _checked(place: str, field: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise DataError(f'{place}: field {field} is {describe(message)}; it must be {{"role": ..., "content": ...}}')
    role = message.get("role")
    if role is None:
        raise DataError(f"{place}: field {field} is {describe(message)} and lacks a role; allowed: {', '.join(ROLES)}")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{place}: field {field}.role is {describe(role)}; allowed: {', '.join(ROLES)}")
    # Parquet fills every field of a struct, so one that is null counts as absent.
    extra = sorted(name for name, item in message.items() if item is not None and name not in _FIELDS)
    if extra:
        raise DataError(
            f"{place}: field {field}.{extra[0]} is {describe(message[extra[0]])}, which is not supported: only role and "
            "content are; take it out, or write it into the content as the model is to see it"
        )
    content = message.get("content")
    if not isinstance(content, str):
        raise DataError(f"{place}: field {field}.content is {describe(content)}; it must be a string")
    return {"role": role, "content": checked_text(place, f"{field}.content", content)}
