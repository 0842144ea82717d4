"""Settings of this package: which rows are trained on, how, and which are held out.

The metadata `words` of a field that may be a mapping is the function that reads it from the words of a shell.

```
RowSettings                          where rows come from, and which are held out
├── PromptDataSettings               prompts to be answered while training (and ChatTemplateSettings)
├── LabelledDataSettings             texts with labels, to be classified (and ChatTemplateSettings)
├── EmbedDataSettings                queries with documents, or texts with labels, to be embedded
└── PretrainDataSettings             documents, of which every token is learned
    └── DataSettings                 rows of any format, of which a part is learned (and ChatTemplateSettings)
        └── PreferenceDataSettings   answers that are better or worse than others
```
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs
from attrs import validators

from forge_data._errors import DataError
from forge_data._formats import AUTO, BUILT_IN, fault_of, is_axolotl, is_known
from forge_data._own_reading import (
    OF_ENTRIES,
    OWN,
    OwnReading,
    check_shape,
    entries_of,
    listed,
    numbered,
    with_texts,
    without_effect,
)
from forge_data._shell_values import columns_of, paths_of
from forge_data._values import MESSAGE_ROLES, keyword_arguments, text_fault, text_given

TRAIN_ON = ("assistant", "last", "completion", "all")
if TYPE_CHECKING:
    Format = str
    TrainOn = str
else:
    # The choices for a command line and its help, made from the one table of formats; other packages may add names.
    Format = Literal[(AUTO, *BUILT_IN)] | str
    TrainOn = Literal[TRAIN_ON] | str
TurnsForm = Literal["auto", "history"]
LearnedEnds = Literal["turn", "all", "last", "none"]
OnOverflow = Literal["drop", "truncate", "split", "error"]
OnLongPrompt = Literal["drop", "error"]
OnLongText = Literal["drop", "truncate", "error"]
OnBadPair = Literal["error", "skip"]
OnBadRow = Literal["error", "skip"]
Lint = Literal["on", "off"]
MAX_BAD_ROWS = 0.01
Paths = str | tuple[str | Mapping[str, Any], ...] | Mapping[str, float | Mapping[str, Any]]

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


def _share_or_count(_: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    if not (0 <= value < 1 or isinstance(value, int)) or value < 0:
        raise ValueError(
            f"{attribute.name} must be a share, at least 0 and less than 1, or a whole number of samples, got {value!r}"
        )


def _as_arguments(value: Any) -> Any:
    return keyword_arguments(_as_tuple(value))


def _arguments(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in value):
        raise TypeError(f"{attribute.name} must be a mapping from names of the template's arguments to values, got {value!r}")


def _as_system_prompt(value: Any) -> Any:
    try:
        return text_given(value)
    except ValueError as error:
        raise ValueError(f"system_prompt {error}") from error


def _system_prompt(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} must be a text, or file: and the path of one, got {value!r}")
    if fault := text_fault(value):
        raise ValueError(f"{attribute.name} {fault}")


def _as_tuple(value: Any) -> Any:
    # YAML gives a list; a tuple cannot be changed.
    return tuple(value) if isinstance(value, list) else value


def _as_paths(value: Any) -> Any:
    if not isinstance(value, (list, tuple, Mapping)):
        return value
    try:
        return with_texts(value)
    except DataError as error:
        raise ValueError(f"data_path: {error}") from error


def _paths(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    try:
        check_shape(value)
    except DataError as error:
        raise ValueError(f"{attribute.name}: {error}") from error
    entries = listed(value) if isinstance(value, (str, tuple, Mapping)) else [(None, None)]
    paths = [path for path, _ in entries]
    if not all(isinstance(path, str) for path in paths):
        raise TypeError(
            f"{attribute.name} must be a path, a list of paths or of mappings with a path, or a mapping of paths to weights, "
            f"got {value!r}"
        )
    if not paths:
        raise ValueError(f"{attribute.name} is empty: no rows were given, and no file; give rows, a file, or several")
    if not all(paths):
        raise ValueError(f"{attribute.name} must name a file at least, and no path may be empty, got {value!r}")
    for path, weight in entries if isinstance(value, Mapping) else ():
        if isinstance(weight, bool) or not isinstance(weight, (int, float, Mapping)):
            raise TypeError(
                f"{attribute.name} must give each path a number as its weight, or a mapping of its own settings, got "
                f"{weight!r} for {path!r}"
            )
        if not isinstance(weight, Mapping) and not 0 < weight < float("inf"):
            raise ValueError(f"{attribute.name} must give each path a weight above 0, got {weight!r} for {path!r}")
    try:
        entries_of(value)
    except DataError as error:
        raise ValueError(f"{attribute.name}: {error}") from error


def _one_of(kind: Any) -> Any:
    def check(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not isinstance(value, str):
            raise TypeError(f"{attribute.name} must be a string, got {value!r}")
        if value not in get_args(kind):
            raise ValueError(f"{attribute.name} must be one of {', '.join(get_args(kind))}, got {value!r}")

    return check


def train_on_fault(value: str) -> str | None:
    """Say what `train_on` must be, unless a text is that."""
    roles = value.split(",")
    if value in TRAIN_ON or (set(roles) <= set(MESSAGE_ROLES) and len(set(roles)) == len(roles)):
        return None
    return (
        f"must be one of {', '.join(TRAIN_ON)}, or roles with commas between them ({', '.join(MESSAGE_ROLES)}), got {value!r}"
    )


def ends_fault(train_on: str, train_on_turn_end: str) -> str | None:
    """Say why both have no effect together; None where they have."""
    if train_on != "all" or train_on_turn_end == "turn":
        return None
    return f"train_on_turn_end={train_on_turn_end!r} has no effect with train_on='all', which learns every token: leave it out"


def _train_on(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} must be a string, such as assistant,user, got {value!r}")
    if fault := train_on_fault(value):
        raise ValueError(f"{attribute.name} {fault}")


def _format(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} must be a string, got {value!r}")
    if not is_known(value):
        raise ValueError(f"{attribute.name} is {value!r}; {fault_of(value)}")


def _function(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} must be the name of a function, got {value!r}")
    if not _FUNCTION.fullmatch(value):
        raise ValueError(f"{attribute.name} must name a function as 'package.module:function', got {value!r}")


def _names(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in (*value, *value.values())):
        raise TypeError(f"{attribute.name} must be a mapping of columns to the names of fields, got {value!r}")
    if not value or not all((*value, *value.values())):
        raise ValueError(f"{attribute.name} must name a column at least, and no name may be empty, got {value!r}")


_POSITIVE = validators.optional([_whole, validators.ge(1)])


@attrs.frozen(kw_only=True)
class RowSettings:
    """Where rows come from, and which are held out for evaluation."""

    data_path: Paths = attrs.field(converter=_as_paths, validator=_paths, metadata={"words": paths_of})
    """Training rows: a file, glob, directory, URL, name:split or dataset_info.json:name (JSONL, JSON, CSV, Parquet, Arrow, also
    compressed); a list of them; or a mapping of them to weights, in a shell a.jsonl=0.7 b.jsonl=0.3, or to mappings of what
    each has of its own, in a shell a.jsonl='{"data_format": "alpaca"}': weight, data_format, rename_columns, preprocess,
    train_on, train_on_turn_end, turns, system_prompt, chat_template_kwargs, on_overflow and max_samples, in place of these
    settings, and random_rows, a share or number of its rows that are read, with random_seed. In a list of such mappings, each
    with its path, one file may be there twice, read in two ways."""

    eval_data_path: Paths | None = attrs.field(
        default=None, converter=_as_paths, validator=validators.optional(_paths), metadata={"words": paths_of}
    )
    """Held-out rows, in any form that data_path may have. Not together with validation_split."""

    validation_split: int | float = attrs.field(default=0.0, validator=[_number, _share_or_count])
    """Share of the kept rows that is held out and never trained on, at least 0 and less than 1; or from 1 on the number of
    samples (of preferences, pairs). What came from one row, and samples of the same tokens, stay on one side."""

    preprocess: str | None = attrs.field(default=None, validator=validators.optional(_function))
    """Your own function that gets each row first, as package.module:function; it returns the row, several, or none."""

    rename_columns: Mapping[str, str] | None = attrs.field(
        default=None, validator=validators.optional(_names), metadata={"words": columns_of}
    )
    """Columns that a format reads under another name, each with that name, such as question=instruction answer=output; renamed
    after preprocess."""

    on_bad_row: OnBadRow = attrs.field(default="error", validator=_one_of(OnBadRow))
    """What becomes of a row that is refused (broken JSON, no known format, a field that is not what it should be, a
    conversation that the template does not write): an error, or left out, counted by reason and listed in dropped.jsonl. Left
    out is then also a row whose every answer is empty, at which the lint stops."""

    max_bad_rows: float = attrs.field(default=MAX_BAD_ROWS, validator=[_number, _share])
    """Share of the rows that on_bad_row=skip may leave out, at least 0 and less than 1; more of them stop the run."""

    max_samples: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Rows that are read of each entry of data_path, and of eval_data_path: the first ones. All by default."""

    def __attrs_post_init__(self) -> None:
        if self.eval_data_path is not None and self.validation_split:
            raise ValueError(
                f"eval_data_path ({self.eval_data_path!r}) and validation_split ({self.validation_split!r}) both name the "
                "held-out rows: give one of them"
            )
        if self.on_bad_row == "error" and self.max_bad_rows != MAX_BAD_ROWS:
            raise ValueError(
                f"max_bad_rows={self.max_bad_rows!r} has no effect without on_bad_row=skip: set it, or leave it out"
            )
        self._check_own()

    def own_values(self, name: str) -> tuple[Any, ...]:
        """Return the values of a setting that entries of the data have of their own."""
        given = [each for each in (self.data_path, self.eval_data_path) if each is not None]
        values = [getattr(entry.own, name) for each in given for _, entry in entries_of(each)]
        return tuple(value for value in values if value is not None)

    def _check_own(self) -> None:
        """Refuse settings of data sets that rows of this use have not, and ones that each has."""
        known = {field.name: field.default for field in attrs.fields(type(self))}
        data_sets = [each for each in (self.data_path, self.eval_data_path) if each is not None]
        for entry, path, own in _owners(data_sets):
            given = {name: value for name, value in attrs.asdict(own).items() if value is not None}
            if not given:
                continue
            given = {name: value for name, value in given.items() if name not in OF_ENTRIES}
            for name, value in given.items():
                if name not in known:
                    raise ValueError(
                        f"data_path: the entry {entry} has {json.dumps({name: value})} of its own, and rows of this use have "
                        f"no {name}: take it out"
                    )
            try:
                # As if it were alone: what its settings may not be together, or beside the run's, is refused.
                attrs.evolve(self, data_path=path, eval_data_path=None, **given)
            except (TypeError, ValueError) as error:
                raise ValueError(f"data_path: of the entry {entry} {error}") from error
        given = [name for name in OWN if name in known and getattr(self, name) != known[name]]
        if (unused := without_effect(given, self.data_path, self.eval_data_path)) is not None:
            raise ValueError(
                f"{unused}={getattr(self, unused)!r} has no effect: each entry of data_path has one of its own; leave it out"
            )


def _owners(data_sets: Sequence[Any]) -> Iterator[tuple[str, str, OwnReading]]:
    """Yield name and path of each entry, and the settings of its own."""
    for each in data_sets:
        entries = entries_of(each)
        for name, (path, entry) in zip(numbered([path for path, _ in entries]), entries, strict=True):
            yield name, path, entry.own


# Without slots, so that a class can have another base beside it.
@attrs.frozen(kw_only=True, slots=False)
class ChatTemplateSettings:
    """With which chat template conversations are written."""

    chat_template: str | None = attrs.field(default=None, validator=validators.optional(validators.instance_of(str)))
    """Chat template in place of the tokenizer's: chatml, llama3, gemma, zephyr or alpaca, a file, or the name of one of several
    that the tokenizer has. It is stored with the model, which is asked with it from then on."""

    chat_template_kwargs: Mapping[str, Any] | tuple[str, ...] | None = attrs.field(
        default=None, converter=_as_arguments, validator=validators.optional(_arguments)
    )
    """Arguments of the chat template, such as enable_thinking=false; those that a row gives itself win. They are stored with
    the model, as defaults of its template."""

    system_prompt: str | None = attrs.field(
        default=None, converter=_as_system_prompt, validator=validators.optional(_system_prompt)
    )
    """System message of conversations that have none, as their first message: a text, or file:PATH of one. forge generate and
    forge chat ask the run with it."""


@attrs.frozen(kw_only=True)
class PromptDataSettings(ChatTemplateSettings, RowSettings):
    """Which prompts are answered while training, and which are held out."""

    max_prompt_len: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Longest prompt in tokens; on_overflow decides what becomes of longer ones. No limit by default."""

    on_overflow: OnLongPrompt = attrs.field(default="drop", validator=_one_of(OnLongPrompt))
    """What becomes of a row whose prompt is longer than max_prompt_len: it is left out and counted, or an error."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_limited("max_prompt_len", self.max_prompt_len, self.on_overflow)


@attrs.frozen(kw_only=True)
class LabelledDataSettings(ChatTemplateSettings, RowSettings):
    """Which labelled texts a classifier is trained on, and which are held out."""

    max_seq_len: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Longest text in tokens; on_overflow decides what becomes of longer ones. No limit by default."""

    on_overflow: OnLongText = attrs.field(default="drop", validator=_one_of(OnLongText))
    """What becomes of a text longer than max_seq_len: it is left out and counted, cut off after its first tokens, or an
    error."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_limited("max_seq_len", self.max_seq_len, self.on_overflow)


@attrs.frozen(kw_only=True)
class EmbedDataSettings(RowSettings):
    """Which texts are trained on as embeddings, and which are held out."""

    max_seq_len: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Longest text in tokens, a query or a document; on_overflow decides what becomes of longer ones. No limit by default."""

    on_overflow: OnLongText = attrs.field(default="drop", validator=_one_of(OnLongText))
    """What becomes of a row with a text longer than max_seq_len: it is left out and counted, the text is cut (special tokens
    at its end stay), or an error."""

    query_prefix: str | None = attrs.field(default=None, validator=validators.optional(validators.instance_of(str)))
    """Put before each query, such as "query: "; stored with the model as its prompt of that name. What it needs at its end, a
    space or a line break, is part of it. Of a model of several modalities it is the system message. By default the one that is
    stored with the model, if any; "" for none."""

    document_prefix: str | None = attrs.field(default=None, validator=validators.optional(validators.instance_of(str)))
    """Put before each document, hard negatives too, such as "passage: "; stored with the model. By default the one that is
    stored with the model, if any; "" for none."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_limited("max_seq_len", self.max_seq_len, self.on_overflow)


@attrs.frozen(kw_only=True)
class PretrainDataSettings(RowSettings):
    """Which documents are trained on, and which are held out."""

    num_proc: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Processes that tokenise. By default one for little data, else one a core, up to 16; the tokens are the same."""

    lint: Lint = attrs.field(default="on", validator=_one_of(Lint))
    """Whether a run is refused where the lint finds what would be learned wrongly. Off trains on it all the same."""


@attrs.frozen(kw_only=True)
class DataSettings(ChatTemplateSettings, PretrainDataSettings):
    """Which rows are trained on, what of them is learned, and which are held out."""

    max_seq_len: int | None = attrs.field(default=None, validator=_POSITIVE)
    """Longest sample in tokens; on_overflow decides what becomes of longer ones. No limit by default."""

    data_format: Format = attrs.field(default=AUTO, validator=_format)
    """Format of the rows: one of these, axolotl:TYPE (a type of data set in Axolotl, which asks in a text of its own, such as
    axolotl:alpaca), or one that an installed package adds. By default it is detected from their fields."""

    train_on: TrainOn = attrs.field(default="assistant", validator=_train_on)
    """What is learned: every assistant turn, the last one, the completion of prompt/completion rows, or all tokens; or what
    several roles say, such as assistant,user, each message with the token that ends it."""

    turns: TurnsForm = attrs.field(default="auto", validator=_one_of(TurnsForm))
    """In which form turns are learned: each in the context in which the model will be asked for it (auto), as one sample where
    the conversation's text allows it and else as one for each learned turn; or as the conversation's text has them (history),
    in which a chat template may write earlier turns otherwise than it asks for them."""

    turn_end: str | None = attrs.field(default=None, validator=validators.optional(validators.instance_of(str)))
    """Token that ends a learned turn for which the chat template writes no end, and the answers of the exported model. By
    default one of the model's EOS list (its generation_config.json or config.json) with which the next message begins, such as
    <|user|>."""

    train_on_turn_end: LearnedEnds = attrs.field(default="turn", validator=_one_of(LearnedEnds))
    """Which ends of turns are learned, each a token such as <|im_end|>, and of text the EOS: that of each learned turn (turn),
    of every message, whoever wrote it (all), of the last learned turn of a row (last), or none, with which a model does not
    learn to stop."""

    on_overflow: OnOverflow = attrs.field(default="drop", validator=_one_of(OnOverflow))
    """What becomes of a row longer than max_seq_len: it is left out and counted, cut off, cut into several, or an error."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_limited("max_seq_len", self.max_seq_len, self.on_overflow)
        if fault := ends_fault(self.train_on, self.train_on_turn_end):
            raise ValueError(fault)


@attrs.frozen(kw_only=True)
class PreferenceDataSettings(DataSettings):
    """Which preferences (pairs, or wanted and unwanted answers) are trained on or held out."""

    on_bad_pair: OnBadPair = attrs.field(default="error", validator=_one_of(OnBadPair))
    """What becomes of a row that prefers nothing (equal answers, two prompts, an empty answer): an error, or left out and
    counted."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        suitable = [AUTO, *(name for name, row in BUILT_IN.items() if row.preferences)]
        wrong = {
            "data_format": (
                (self.data_format in BUILT_IN or is_axolotl(self.data_format)) and self.data_format not in suitable,
                f"holds no preferences: use {' or '.join(suitable)}",
            ),
            "train_on": (
                self.train_on not in ("assistant", "last", "completion"),
                "learns the prompt too, which prefers nothing: use assistant, last or completion",
            ),
            "train_on_turn_end": (
                self.train_on_turn_end == "all",
                "learns ends of the prompt's messages too, which prefer nothing: use turn, last or none",
            ),
            "on_overflow": (self.on_overflow == "split", "cannot cut a preference into several: use drop, truncate or error"),
        }
        for name, (refused, why) in wrong.items():
            if refused:
                raise ValueError(f"{name}={getattr(self, name)!r} {why}")


def _check_limited(limit: str, value: int | None, on_overflow: str) -> None:
    if value is None and on_overflow != "drop":
        raise ValueError(f"on_overflow={on_overflow!r} has no effect without a limit: set {limit}, or leave it out")
