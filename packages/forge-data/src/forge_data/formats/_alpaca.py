"""Alpaca row (`instruction`, `input`, `output`) → conversation."""

from forge_data._errors import DataError
from forge_data._values import describe, from_json, string
from forge_data.formats._chat import MEDIA_FIELDS, TEMPLATE_FIELDS, chat
from forge_data.formats._format import Fields, Format
from forge_data.formats._messages import Turns
from forge_data.formats._rated import rejects
from forge_data.formats._samples import Chat, Message
from forge_data.formats._sharegpt import with_system


def alpaca(place: str, fields: Fields) -> Chat:
    """Read a row as system message, turns of `history`, question and answer.

    The question is the instruction and, after an empty line, the input. The output is a completion. In a row with `history` its
    answers are learned too, as in LLaMA-Factory, so the row is a conversation without a completion.

    Raises:
        DataError: a field that is not a string, or a history that is not a list of pairs.
    """
    turns = question(place, fields, between="\n\n")
    answered = [*turns.messages, {"role": "assistant", "content": string(place, "output", fields["output"])}]
    learned = 0 if from_json(fields.get("history")) else len(turns.messages)
    return chat(place, fields, turns._replace(messages=answered), learned, media=field_of)


def question(place: str, fields: Fields, *, between: str) -> Turns:
    """Read system message, turns of `history` and the question; errors as `alpaca`.

    `between` stands between instruction and input.
    """
    instruction, details = (string(place, name, fields.get(name, "")) for name in ("instruction", "input"))
    asked = {"role": "user", "content": between.join(part for part in (instruction, details) if part)}
    return with_system(place, fields, Turns([*history_of(place, fields.get("history")), asked], None))


def history_of(place: str, value: object) -> list[Message]:
    """Read turns of `history`, pairs of a question and its answer; errors as `alpaca`."""
    value = from_json(value)
    if not value:
        return []
    if not isinstance(value, list):
        raise DataError(f"{place}: field history is {describe(value)}; it must be a list of [question, answer]")
    messages: list[Message] = []
    for index, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{place}: field history[{index}] is {describe(pair)}; it must be [question, answer]")
        for side, role in enumerate(("user", "assistant")):
            messages.append({"role": role, "content": string(place, f"history[{index}][{side}]", pair[side])})
    return messages


def field_of(fields: Fields, index: int, _part: str, _answer: str) -> str:
    """Name the field of a message; the answer is `output`."""
    if fields.get("system"):
        if index == 0:
            return "system"
        index -= 1
    history = from_json(fields.get("history"))
    pairs = len(history) if isinstance(history, list) else 0
    return f"history[{index // 2}][{index % 2}]" if index < 2 * pairs else ("instruction", "output")[index - 2 * pairs]


def _has_both(row: Fields) -> bool:
    return "instruction" in row and "output" in row


ALPACA = Format(
    needs="instruction, output",
    matches=lambda row: _has_both(row) and "kto_tag" not in row and not rejects(row),
    convert=alpaca,
    field_of=field_of,
    reads=(*TEMPLATE_FIELDS, *MEDIA_FIELDS),
    # Chosen by name, it ignores what rates the output.
    accepts=_has_both,
)
"""Stanford Alpaca's rows, with LLaMA-Factory's `system` and `history`."""
