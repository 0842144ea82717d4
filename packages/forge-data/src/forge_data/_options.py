"""Arguments that `prepare`, `tokenize` and `lint` share, checked once."""

from typing import Any, get_args

import attrs

from forge_data._errors import DataError
from forge_data._formats import AUTO
from forge_data._settings import OnBadPair, OnLongPrompt, OnOverflow, TrainOn, TurnsForm

TRAIN_ON: tuple[str, ...] = get_args(TrainOn)
TURNS: tuple[str, ...] = get_args(TurnsForm)
ON_OVERFLOW: tuple[str, ...] = get_args(OnOverflow)
ON_BAD_PAIR: tuple[str, ...] = get_args(OnBadPair)
ON_LONG_PROMPT: tuple[str, ...] = get_args(OnLongPrompt)


def _one_of(allowed: tuple[str, ...]) -> Any:
    def check(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if value not in allowed:
            raise DataError(f"`{attribute.name}` is {value!r}; allowed: {', '.join(allowed)}")

    return check


def _length(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise DataError(f"`{attribute.name}` must be a whole number of at least 1 (none for no limit), got {value!r}")


@attrs.frozen(kw_only=True)
class Options:
    """Checked arguments; `format` is checked where the formats are loaded."""

    format: str = AUTO
    train_on: str = attrs.field(default="assistant", validator=_one_of(TRAIN_ON))
    turns: str = attrs.field(default="auto", validator=_one_of(TURNS))
    max_seq_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_OVERFLOW))
    on_bad_pair: str = attrs.field(default="error", validator=_one_of(ON_BAD_PAIR))


@attrs.frozen(kw_only=True)
class PromptOptions:
    """Checked arguments of `prepare_prompts`."""

    max_prompt_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_LONG_PROMPT))
