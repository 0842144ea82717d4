"""Settings of this room: which rows are trained on and what of them is learned, and which are kept aside to measure by.

```
RowSettings                          where rows come from, and which are held out
├── PromptDataSettings               prompts to be answered while training
└── PretrainDataSettings             documents, of which every token is learned
    └── DataSettings                 rows of any format, of which a part is learned
        └── PreferenceDataSettings   answers that are better or worse than others
```
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs
from attrs import validators

# The names of `_formats.FORMATS`, which loads more than settings may.
Format = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "unpaired_preference", "tokenised",
    "document",
]  # fmt: skip
_TOLD_BY_THE_ROWS: Format = "auto"
TrainOn = Literal["assistant", "last", "completion", "all"]
OnOverflow = Literal["drop", "truncate", "split", "error"]
OnLongPrompt = Literal["drop", "error"]
OnBadPair = Literal["error", "skip"]
_PREFERENCES: tuple[Format, ...] = ("auto", "preference", "unpaired_preference")
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
class RowSettings:
    """Where rows come from, and which are kept aside to measure by."""

    data_path: Paths = attrs.field(converter=_listed, validator=_paths)
    """Training rows: a file, glob, directory, URL or name:split (JSONL, JSON, CSV, Parquet, Arrow, also compressed); a list of
    them; or a mapping of them to weights."""

    eval_data_path: Paths | None = attrs.field(default=None, converter=_listed, validator=validators.optional(_paths))
    """Held-out rows, in any form that data_path may have. Not together with validation_split."""

    validation_split: float = attrs.field(default=0.0, validator=[_number, _share])
    """Share of the kept rows that is held out and never trained on, at least 0 and less than 1."""

    preprocess: str | None = attrs.field(default=None, validator=validators.optional(_function))
    """Your own function that sees each row first, as package.module:function; it gives back the row, several, or none."""

    def __attrs_post_init__(self) -> None:
        if self.eval_data_path is not None and self.validation_split:
            raise ValueError(
                f"eval_data_path ({self.eval_data_path!r}) and validation_split ({self.validation_split!r}) both name the "
                "held-out rows: give one of them"
            )


@attrs.frozen(kw_only=True)
class PromptDataSettings(RowSettings):
    """Which prompts are answered while training, and which are kept aside to measure by."""

    max_prompt_len: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Longest prompt in tokens; on_overflow says what becomes of longer ones. No limit by default."""

    on_overflow: OnLongPrompt = attrs.field(default="drop", validator=_choice(OnLongPrompt))
    """What becomes of a row whose prompt is longer than max_prompt_len: it is left out and counted, or an error."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_limited("max_prompt_len", self.max_prompt_len, self.on_overflow)


@attrs.frozen(kw_only=True)
class PretrainDataSettings(RowSettings):
    """Which documents are trained on, and which are kept aside to measure by."""

    num_proc: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Processes that tokenise. By default one for little data, else one a core, up to 16; the tokens are the same."""

    lint: Lint = attrs.field(default="on", validator=_choice(Lint))
    """Whether a run is refused where the lint finds what would be learned wrongly. Off trains on it all the same."""


@attrs.frozen(kw_only=True)
class DataSettings(PretrainDataSettings):
    """Which rows are trained on and what of them is learned, and which are kept aside to measure by."""

    max_seq_len: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Longest sample in tokens; on_overflow says what becomes of longer ones. No limit by default."""

    data_format: Format = attrs.field(default=_TOLD_BY_THE_ROWS, validator=_choice(Format))
    """Format of the rows. By default it is told from them."""

    train_on: TrainOn = attrs.field(default="assistant", validator=_choice(TrainOn))
    """What is learned: every assistant turn, the last one, the completion of prompt/completion rows, or all tokens."""

    on_overflow: OnOverflow = attrs.field(default="drop", validator=_choice(OnOverflow))
    """What becomes of a row longer than max_seq_len: it is left out and counted, cut off, cut into several, or an error."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_limited("max_seq_len", self.max_seq_len, self.on_overflow)


@attrs.frozen(kw_only=True)
class PreferenceDataSettings(DataSettings):
    """Which preferences are trained on (pairs of answers, or answers that are wanted or not), and which are kept aside."""

    on_bad_pair: OnBadPair = attrs.field(default="error", validator=_choice(OnBadPair))
    """What becomes of a row that prefers nothing: equal answers, two prompts, an empty answer. An error, or left out and counted."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        wrong = {
            "data_format": (self.data_format not in _PREFERENCES, "holds no preferences: use " + " or ".join(_PREFERENCES)),
            "train_on": (
                self.train_on == "all",
                "learns the prompt too, which prefers nothing: use assistant, last or completion",
            ),
            "on_overflow": (self.on_overflow == "split", "cannot cut a preference into several: use drop, truncate or error"),
        }
        for name, (refused, why) in wrong.items():
            if refused:
                raise ValueError(f"{name}={getattr(self, name)!r} {why}")


def _check_limited(limit: str, value: int | None, on_overflow: str) -> None:
    if value is None and on_overflow != "drop":
        raise ValueError(f"on_overflow={on_overflow!r} has no effect without a limit: set {limit}, or leave it out")
