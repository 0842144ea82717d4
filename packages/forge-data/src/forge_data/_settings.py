"""Settings of this room: which rows are trained on and what of them is learned, and which are kept aside to measure by."""

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs
from attrs import validators

# The names of `_formats.FORMATS`, which loads more than settings may.
Format = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "unpaired_preference", "tokenised"
]
_TOLD_BY_THE_ROWS: Format = "auto"
TrainOn = Literal["assistant", "last", "completion", "all"]
OnOverflow = Literal["drop", "truncate", "split", "error"]
Lint = Literal["on", "off"]
Paths = str | tuple[str, ...] | Mapping[str, float]

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _whole(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{attribute.name} must be a whole number, got {value!r}")


def _number(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{attribute.name} must be a number, got {value!r}")


def _share(_: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    # Written so that NaN, which compares false with everything, is refused too.
    if not 0 <= value < 1:
        raise ValueError(f"{attribute.name} must be at least 0 and less than 1, got {value!r}")


def _listed(value: Any) -> Any:
    # A list is what YAML has; a tuple cannot be changed.
    return tuple(value) if isinstance(value, list) else value


def _paths(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    paths = [value] if isinstance(value, str) else list(value) if isinstance(value, (tuple, Mapping)) else [None]
    if not all(isinstance(path, str) for path in paths):
        raise TypeError(f"{attribute.name} must be a path, a list of paths, or a mapping of paths to weights, got {value!r}")
    if not paths or not all(paths):
        raise ValueError(f"{attribute.name} must name a file at least, and no path may be empty, got {value!r}")
    for path, weight in value.items() if isinstance(value, Mapping) else ():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise TypeError(f"{attribute.name} must give each path a number as its weight, got {weight!r} for {path!r}")
        if not 0 < weight < float("inf"):
            raise ValueError(f"{attribute.name} must give each path a weight above 0, got {weight!r} for {path!r}")


def _choice(kind: Any) -> Any:
    def check(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not isinstance(value, str):
            raise TypeError(f"{attribute.name} must be a string, got {value!r}")
        if value not in get_args(kind):
            raise ValueError(f"{attribute.name} must be one of {', '.join(get_args(kind))}, got {value!r}")

    return check


def _function(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} must be the name of a function, got {value!r}")
    if not _FUNCTION.fullmatch(value):
        raise ValueError(f"{attribute.name} must name a function as 'package.module:function', got {value!r}")


_POSITIVE = validators.optional([_whole, validators.ge(1)])


@attrs.frozen(kw_only=True)
class DataSettings:
    """Which rows are trained on and what of them is learned, and which are kept aside to measure by."""

    data_path: Paths = attrs.field(converter=_listed, validator=_paths)
    """Training rows: a file, glob, directory, URL or name:split (JSONL, JSON, CSV, Parquet, Arrow, also compressed); a list of
    them; or a mapping of them to weights."""

    eval_data_path: Paths | None = attrs.field(default=None, converter=_listed, validator=validators.optional(_paths))
    """Held-out rows, in any form that data_path may have. Not together with validation_split."""

    validation_split: float = attrs.field(default=0.0, validator=[_number, _share])
    """Share of the kept rows that is held out and never trained on, at least 0 and less than 1."""

    max_seq_len: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Longest sample in tokens; on_overflow says what becomes of longer ones. No limit by default."""

    data_format: Format = attrs.field(default=_TOLD_BY_THE_ROWS, validator=_choice(Format))
    """Format of the rows. By default it is told from them."""

    train_on: TrainOn = attrs.field(default="assistant", validator=_choice(TrainOn))
    """What is learned: every assistant turn, the last one, the completion of prompt/completion rows, or all tokens."""

    on_overflow: OnOverflow = attrs.field(default="drop", validator=_choice(OnOverflow))
    """What becomes of a row longer than max_seq_len: it is left out and counted, cut off, cut into several, or an error."""

    preprocess: str | None = attrs.field(default=None, validator=validators.optional(_function))
    """Your own function that sees each row first, as package.module:function; it gives back the row, several, or none."""

    num_proc: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Processes that tokenise. By default one for little data, else one a core, up to 16; the tokens are the same."""

    lint: Lint = attrs.field(default="on", validator=_choice(Lint))
    """Whether a run is refused where the lint finds what would be learned wrongly. Off trains on it all the same."""

    def __attrs_post_init__(self) -> None:
        if self.eval_data_path is not None and self.validation_split:
            raise ValueError(
                f"eval_data_path ({self.eval_data_path!r}) and validation_split ({self.validation_split!r}) both name the "
                "held-out rows: give one of them"
            )
        if self.max_seq_len is None and self.on_overflow != "drop":
            raise ValueError(
                f"on_overflow={self.on_overflow!r} has no effect without a limit: set max_seq_len, or leave it out"
            )
