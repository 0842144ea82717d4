"""How rows become samples: what `prepare`, `tokenize` and `lint` have in common, checked once."""

from typing import Any

import attrs

from forge_data._errors import DataError

TRAIN_ON = ("assistant", "last", "completion", "all")
ON_OVERFLOW = ("drop", "truncate", "split", "error")
ON_BAD_PAIR = ("error", "skip")
ON_LONG_PROMPT = ("drop", "error")


def _one_of(allowed: tuple[str, ...]) -> Any:
    def check(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if value not in allowed:
            raise DataError(f"{attribute.name} is {value!r}; allowed: {', '.join(allowed)}")

    return check


def _length(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise DataError(f"{attribute.name} must be a whole number of at least 1, or None for no limit; got {value!r}")


@attrs.frozen(kw_only=True)
class Options:
    """Checked arguments; `format` is checked where the formats are known."""

    format: str = "auto"
    train_on: str = attrs.field(default="assistant", validator=_one_of(TRAIN_ON))
    max_seq_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_OVERFLOW))
    on_bad_pair: str = attrs.field(default="error", validator=_one_of(ON_BAD_PAIR))


@attrs.frozen(kw_only=True)
class PromptOptions:
    """Checked arguments of `prepare_prompts`."""

    max_prompt_len: int | None = attrs.field(default=None, validator=_length)
    on_overflow: str = attrs.field(default="drop", validator=_one_of(ON_LONG_PROMPT))
