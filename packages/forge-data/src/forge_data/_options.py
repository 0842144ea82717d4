"""Arguments that `prepare`, `tokenize` and `lint` share, checked once."""

import os
from collections.abc import Mapping
from typing import Any, get_args

import attrs

from forge_data._errors import DataError
from forge_data._formats import AUTO
from forge_data._settings import OnBadPair, OnLongPrompt, OnOverflow, TrainOn, TurnsForm
from forge_data._values import describe, keyword_arguments

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


def _template(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"`{attribute.name}` is {describe(value)}; it must be a file, or the name of a template of the tokenizer"
        )


def _token(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise DataError(f"`{attribute.name}` is {describe(value)}; it must be a token, such as '<|user|>'")


def _arguments(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(name, str) and name.isidentifier() for name in value):
        raise DataError(f"`{attribute.name}` is {describe(value)}; it must be an object of arguments' names and values")


def _as_arguments(value: Any) -> Any:
    read = keyword_arguments(value)
    return dict(read) if isinstance(read, Mapping) else {} if read is None else read


def _as_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@attrs.frozen(kw_only=True)
class TemplateOptions:
    """Checked arguments about the chat template."""

    chat_template: str | None = attrs.field(default=None, converter=_as_path, validator=_template)
    chat_template_kwargs: dict[str, Any] = attrs.field(factory=dict, converter=_as_arguments, validator=_arguments)


@attrs.frozen(kw_only=True)
class Options(TemplateOptions):
    """Checked arguments; `format` is checked where the formats are loaded."""

    format: str = AUTO
    train_on: str = attrs.field(default="assistant", validator=_one_of(TRAIN_ON))
    turns: str = attrs.field(default="auto", validator=_one_of(TURNS))
    turn_end: str | None = attrs.field(default=None, validator=_token)
    max_seq_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_OVERFLOW))
    on_bad_pair: str = attrs.field(default="error", validator=_one_of(ON_BAD_PAIR))


@attrs.frozen(kw_only=True)
class PromptOptions(TemplateOptions):
    """Checked arguments of `prepare_prompts`."""

    max_prompt_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_LONG_PROMPT))
