"""A row to one of three kinds of sample, checked field by field; the shapes that are known stand in one table."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs
import numpy as np

from forge_data._describe import describe
from forge_data._errors import DataError
from forge_data._messages import Message, checked_messages, checked_text
from forge_data._tokenised import Tokens, checked_tokens


@attrs.frozen
class Chat:
    """A conversation; assistant messages from index `first_trained` on are learned."""

    place: str
    messages: list[Message]
    first_trained: int


@attrs.frozen
class Text:
    """Plain prompt and completion; the completion is learned."""

    place: str
    prompt: str
    completion: str


Sample = Chat | Text | Tokens


class Shape(NamedTuple):
    """A known form of row."""

    needs: tuple[str, ...]
    kind: type | None
    """What the first of the needed fields holds, where that tells two shapes apart."""
    parse: Callable[[str, Mapping[str, Any], int | None], Sample]

    def fits(self, fields: Mapping[str, Any]) -> bool:
        """Whether a row has this shape."""
        here = all(field in fields for field in self.needs)
        return here and (self.kind is None or all(isinstance(fields[field], self.kind) for field in self.needs))


def _messages(place: str, fields: Mapping[str, Any], _: int | None) -> Sample:
    return Chat(place, checked_messages(place, "messages", fields["messages"]), 0)


def _text(place: str, fields: Mapping[str, Any], _: int | None) -> Sample:
    prompt, completion = (checked_text(place, name, fields[name]) for name in ("prompt", "completion"))
    return Text(place, prompt, completion)


def _turns(place: str, fields: Mapping[str, Any], _: int | None) -> Sample:
    prompt, completion = (checked_messages(place, name, fields[name]) for name in ("prompt", "completion"))
    return Chat(place, prompt + completion, len(prompt))


def _tokens(place: str, fields: Mapping[str, Any], vocabulary: int | None) -> Sample:
    return checked_tokens(place, fields, vocabulary)


SHAPES: dict[str, Shape] = {
    "messages": Shape(("messages",), None, _messages),
    "prompt/completion as strings": Shape(("prompt", "completion"), str, _text),
    "prompt/completion as messages": Shape(("prompt", "completion"), list, _turns),
    "tokenised": Shape(("input_ids", "labels"), None, _tokens),
}

_MASKS = "masks are not read: give input_ids and labels, and write the mask into labels as -100"
# Fields that change what a row means. To pass over them would train something else than was asked.
_MEANINGFUL = {
    "tools": "tool definitions are not passed to chat templates yet",
    "functions": "function definitions are not passed to chat templates yet",
    "documents": "documents are not passed to chat templates yet",
    "chat_template_kwargs": "template arguments are not passed on yet",
    "images": "only text is trained",
    "unmask": "loss is on assistant turns only",
    "loss_mask": _MASKS,
    "completion_mask": _MASKS,
    "assistant_masks": _MASKS,
    "position_ids": "positions are counted from 0 in every row: one row, one sample",
    "token_type_ids": "token types are not passed to the model",
    "seq_lengths": "packing is done while training: one row, one sample",
}


def shape_of(place: str, fields: Mapping[str, Any]) -> str:
    """The name of the one known shape that a row has.

    Raises:
        DataError: none or several fit, or the row has a field that cannot be honoured.
    """
    fitting = [name for name, shape in SHAPES.items() if shape.fits(fields)]
    if len(fitting) == 1:
        for field, why in _MEANINGFUL.items():
            if _says_something(fields.get(field)):
                raise DataError(f"{place}: field {field} is {describe(fields[field])}, and {why}; take it out of the rows")
        return fitting[0]
    has = f"{place} has the fields {', '.join(map(repr, fields)) or '(none)'}"
    if fitting:
        raise DataError(f"{has}, which fit more than one known shape: {' and '.join(fitting)}; keep one of them")
    if "prompt" in fields and "completion" in fields:
        raise DataError(
            f"{place}: prompt is {describe(fields['prompt'])} and completion is {describe(fields['completion'])}; "
            "make both strings, or both lists of messages"
        )
    known = "; ".join(f"{name} ({', '.join(shape.needs)})" for name, shape in SHAPES.items())
    raise DataError(f"{has}, which are no known shape; known: {known}")


def _says_something(value: object) -> bool:
    return bool(len(value) if isinstance(value, np.ndarray) else value)


def parse(shape: str, place: str, fields: Mapping[str, Any], vocabulary: int | None) -> Sample:
    """A row of a known shape as a sample; `vocabulary` is the number of token ids there are.

    Raises:
        DataError: a field that is not what its shape says, by place and field.
    """
    return SHAPES[shape].parse(place, fields, vocabulary)
