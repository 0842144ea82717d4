"""`train_detail` of a message, or `train` of its parts → learned stretches of its content.

`train_detail` is Axolotl's: a list of `begin_offset`, `end_offset` (the last character, itself included) and `train`. Of such a
message what no entry covers is not learned; a part that says nothing is learned where the message is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from forge_data._errors import DataError
from forge_data._media import Media
from forge_data._values import describe, from_json
from forge_data.formats._samples import Ranges, Stretches

DETAIL = "train_detail"
LEARNED = ("train", "weight", "loss", "loss_scale", DETAIL)
"""Fields of a message that say how much it is learned."""
_KEYS = ("begin_offset", "end_offset", "train")
_FORM = '{"begin_offset": 0, "end_offset": 8, "train": false}'


def detail_of(place: str, field: str, value: Any, content: Any) -> Ranges:
    """Read the entries of a message's `train_detail` as learned stretches of its content.

    Raises:
        DataError: no list of entries, one beyond the content, or two that cover one character and say two things.
    """
    entries = from_json(value)
    if not isinstance(entries, list):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be a list of {_FORM}")
    if entries and not isinstance(content, str):
        raise DataError(f"{place}: field {field} needs a content that is one text; have its parts say train instead")
    says: list[bool | None] = [None] * len(content or "")
    for at, entry in enumerate(entries):
        start, last, train = _entry(place, f"{field}[{at}]", entry, len(says))
        if (not train) in says[start : last + 1]:
            raise DataError(
                f"{place}: field {field}[{at}] says train: {str(train).lower()} of characters of which an earlier entry says "
                "the opposite; let no two entries overlap so"
            )
        says[start : last + 1] = [train] * (last + 1 - start)
    return _ranges([each is True for each in says])


def _entry(place: str, field: str, entry: object, length: int) -> tuple[int, int, bool]:
    numbers = [entry.get(name) for name in _KEYS[:2]] if isinstance(entry, dict) else []
    if (
        not isinstance(entry, dict)
        or entry.keys() != {*_KEYS}
        or not isinstance(entry["train"], bool)
        or not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    ):
        raise DataError(f"{place}: field {field} is {describe(entry)}; it must be like {_FORM}")
    start, last = entry["begin_offset"], entry["end_offset"]
    if not 0 <= start <= last < length:
        raise DataError(
            f"{place}: field {field} goes from character {start} to {last} of a content of {length}; both are counted from 0, "
            "and end_offset is that of the last character itself"
        )
    return start, last, entry["train"]


def flags_of_parts(place: str, field: str, given: Any, content: Any, *, whole: bool) -> Stretches | None:
    """Read `train` (or `weight`, 0 or 1) of a content's parts as stretches.

    None where no part has one.

    Args:
        place: of the row.
        field: of the content.
        given: the content as the row has it.
        content: what it became.
        whole: whether the message says itself that it is learned.

    Raises:
        DataError: a content with media.
    """
    flags = [_flag(part) for part in given] if isinstance(given, list) else []
    if all(flag is None for flag in flags):
        return None
    if not isinstance(content, str):
        raise DataError(f"{place}: field {field} has parts that say train beside media; leave train out of them")
    says: list[bool | None] = []
    for part, flag in zip(given, flags, strict=True):
        says += [whole or None if flag is None else flag] * len(part["text"])
    return Stretches(_ranges([each is True for each in says]), _ranges([each is None for each in says]))


def without_flags(place: str, field: str, parts: Sequence[Any]) -> list[Any]:
    """Return the parts of a content without their `train` and `weight`.

    Raises:
        DataError: one that is neither true nor false, 0 nor 1; both, which say two things.
    """
    found = []
    for at, part in enumerate(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            train, weight = part.get("train"), part.get("weight")
            if not (train is None or isinstance(train, bool)) or weight not in (None, 0, 1):
                name = "weight" if train is None or isinstance(train, bool) else "train"
                allowed = "0 or 1" if name == "weight" else "true or false"
                raise DataError(f"{place}: field {field}[{at}].{name} is {describe(part[name])}; it must be {allowed}")
            if train is not None and weight is not None and train != bool(weight):
                raise DataError(f"{place}: field {field}[{at}] has train and weight, which say two things; keep one of them")
            found.append({name: item for name, item in part.items() if name not in ("train", "weight")})
        else:
            found.append(part)
    return found


def check_without_media(place: str, asks: Mapping[int, Stretches | None], media: Sequence[Media]) -> None:
    """Refuse stretches in a row with media, whose placeholders change where characters are.

    Raises:
        DataError: naming the message.
    """
    found = next((index for index, stretches in asks.items() if stretches is not None), None)
    if media and found is not None:
        raise DataError(
            f"{place}: message {found} says of stretches of its text whether they are learned, and the row has media, beside "
            "which only whole messages can say it; take that out, or the media"
        )


def _flag(part: Any) -> bool | None:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        return None
    return part["train"] if part.get("train") is not None else None if part.get("weight") is None else bool(part["weight"])


def _ranges(learned: Sequence[bool]) -> Ranges:
    edges = [at for at in range(len(learned) + 1) if (at and learned[at - 1]) != (at < len(learned) and learned[at])]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
