"""Arguments that `prepare`, `prepare_prompts`, `tokenize` and `lint` share, checked once."""

import json
import os
from collections.abc import Mapping
from typing import Any, get_args

import attrs

from forge_data._errors import BadPairError, DataError, ForgeDataError
from forge_data._formats import AUTO
from forge_data._settings import (
    MAX_BAD_ROWS,
    LearnedEnds,
    OnBadPair,
    OnBadRow,
    OnLongPrompt,
    OnLongText,
    OnOverflow,
    TurnsForm,
    ends_fault,
    train_on_fault,
)
from forge_data._values import NO_ARGUMENTS, describe, keyword_arguments, text_fault, text_given

TURNS: tuple[str, ...] = get_args(TurnsForm)
LEARNED_ENDS: tuple[str, ...] = get_args(LearnedEnds)
ON_OVERFLOW: tuple[str, ...] = get_args(OnOverflow)
ON_BAD_PAIR: tuple[str, ...] = get_args(OnBadPair)
ON_BAD_ROW: tuple[str, ...] = get_args(OnBadRow)
ON_LONG_PROMPT: tuple[str, ...] = get_args(OnLongPrompt)
ON_LONG_TEXT: tuple[str, ...] = get_args(OnLongText)


def _one_of(allowed: tuple[str, ...]) -> Any:
    def check(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if value not in allowed:
            raise DataError(f"`{attribute.name}` is {value!r}; allowed: {', '.join(allowed)}")

    return check


def _train_on(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    fault = (
        train_on_fault(value)
        if isinstance(value, str)
        else f"is {describe(value)}; it must be a string, such as assistant,user"
    )
    if fault:
        raise DataError(f"`{attribute.name}` {fault}")


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
    for name in NO_ARGUMENTS & value.keys():
        raise DataError(f"`{attribute.name}` has {name!r}, which is no argument of a template; take it out")
    for name, item in value.items():
        try:
            json.dumps(item, ensure_ascii=False, allow_nan=False, sort_keys=True).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"`{attribute.name}` has {name!r} with a value that is no JSON: {error}; change it") from error


def _as_arguments(value: Any) -> Any:
    read = keyword_arguments(value)
    return dict(read) if isinstance(read, Mapping) else {} if read is None else read


def _as_system_prompt(value: Any) -> Any:
    try:
        return text_given(value)
    except ValueError as error:
        raise DataError(f"`system_prompt` {error}") from error


def _system_prompt(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise DataError(f"`{attribute.name}` is {describe(value)}; it must be a text, or file: and the path of one")
    if value is not None and (fault := text_fault(value)):
        raise DataError(f"`{attribute.name}` {fault}")


def _as_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# Without slots, so that a class can have another base beside it.
@attrs.frozen(kw_only=True, slots=False)
class TemplateOptions:
    """Checked arguments about the chat template."""

    chat_template: str | None = attrs.field(default=None, converter=_as_path, validator=_template)
    chat_template_kwargs: dict[str, Any] = attrs.field(factory=dict, converter=_as_arguments, validator=_arguments)
    system_prompt: str | None = attrs.field(default=None, converter=_as_system_prompt, validator=_system_prompt)


def _flag(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, bool):
        raise DataError(f"`{attribute.name}` is {describe(value)}; it must be true or false")


def _names(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, Mapping):
        raise DataError(f"`{attribute.name}` is {describe(value)}; it must be a mapping of columns to the names of fields")
    for name in (*value, *value.values()):
        if not isinstance(name, str) or not name:
            raise DataError(f"`{attribute.name}` holds {describe(name)}; columns and fields have names")


def _share(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise DataError(f"`{attribute.name}` must be a number from 0 and below 1, got {value!r}")


@attrs.frozen(kw_only=True)
class RowOptions:
    """Checked arguments for rows of any use."""

    rename_columns: Mapping[str, str] = attrs.field(
        default=None, converter=attrs.converters.default_if_none(factory=dict), validator=_names
    )
    on_bad_row: str = attrs.field(default="error", validator=_one_of(ON_BAD_ROW))
    max_bad_rows: float = attrs.field(default=MAX_BAD_ROWS, validator=_share)
    max_samples: int | None = attrs.field(default=None, validator=_length)

    def __attrs_post_init__(self) -> None:
        if self.on_bad_row == "error" and self.max_bad_rows != MAX_BAD_ROWS:
            raise DataError(f"`max_bad_rows` ({self.max_bad_rows!r}) has no effect unless `on_bad_row` is skip; set it so")

    def allows(self, error: ForgeDataError) -> bool:  # noqa: ARG002 - samples have further settings
        """Tell whether a row with this error may be left out, however many there are."""
        return False

    def skips(self, error: ForgeDataError) -> bool:
        """Tell whether a row with this error is left out."""
        return self.on_bad_row == "skip" or self.allows(error)


@attrs.frozen(kw_only=True)
class Options(TemplateOptions, RowOptions):
    """Checked arguments; `format` is checked where the formats are loaded."""

    format: str = AUTO
    train_on: str = attrs.field(default="assistant", validator=_train_on)
    turns: str = attrs.field(default="auto", validator=_one_of(TURNS))
    turn_end: str | None = attrs.field(default=None, validator=_token)
    train_on_turn_end: str = attrs.field(default="turn", validator=_one_of(LEARNED_ENDS))
    max_seq_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_OVERFLOW))
    on_bad_pair: str = attrs.field(default="error", validator=_one_of(ON_BAD_PAIR))
    media: bool = attrs.field(default=False, validator=_flag)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if fault := ends_fault(self.train_on, self.train_on_turn_end):
            raise DataError(fault)

    def allows(self, error: ForgeDataError) -> bool:
        """Tell whether it is a pair that prefers nothing, and those are skipped."""
        return isinstance(error, BadPairError) and self.on_bad_pair == "skip"


@attrs.frozen(kw_only=True)
class PromptOptions(TemplateOptions, RowOptions):
    """Checked arguments of `prepare_prompts`."""

    max_prompt_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_LONG_PROMPT))
    media: bool = attrs.field(default=False, validator=_flag)

    @property
    def limit(self) -> int | None:
        """Most tokens of a prompt."""
        return self.max_prompt_len


@attrs.frozen(kw_only=True)
class TextOptions(TemplateOptions, RowOptions):
    """Checked arguments of `prepare_labelled`."""

    max_seq_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_LONG_TEXT))
    media: bool = attrs.field(default=False, validator=_flag)
    as_messages: bool = attrs.field(default=False, validator=_flag)
    generation_prompt: bool = attrs.field(default=False, validator=_flag)

    @property
    def limit(self) -> int | None:
        """Most tokens of a text."""
        return self.max_seq_len


def _prefix(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, str):
        raise DataError(f"`{attribute.name}` is {describe(value)}; it must be a text, such as 'query: '")


@attrs.frozen(kw_only=True)
class PairOptions(RowOptions):
    """Checked arguments of `prepare_text_pairs`."""

    max_seq_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_LONG_TEXT))
    query_prefix: str = attrs.field(default="", validator=_prefix)
    document_prefix: str = attrs.field(default="", validator=_prefix)
    media: bool = attrs.field(default=False, validator=_flag)
    as_messages: bool = attrs.field(default=False, validator=_flag)
    generation_prompt: bool = attrs.field(default=False, validator=_flag)

    @property
    def limit(self) -> int | None:
        """Most tokens of a text."""
        return self.max_seq_len
