"""Source of rows → options, encoder and linter of its rows, in which data sets may differ."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_data._errors import DataError, TemplateError
from forge_data._formats import AUTO
from forge_data._options import Options, PairOptions, PromptOptions, TextOptions
from forge_data._own_reading import NOTHING_OWN, OwnReading, numbered, of_entry
from forge_data.formats._registry import check_name
from forge_data.linting._row import RowLint
from forge_data.reading._preprocess import load_preprocess
from forge_data.reading._sources import Source
from forge_data.tokenizing._chat_template import with_template
from forge_data.tokenizing._encoder import Encoder

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from transformers import PreTrainedTokenizerBase


def check_own(
    sources: Sequence[Source],
    options: Options | PromptOptions | TextOptions | PairOptions,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> None:
    """Refuse an entry's own settings that rows of this use have not, or may not have.

    Raises:
        DataError: naming entry and setting.
        TemplateError: the chat template reads no argument of a name that an entry gives.
    """
    entries = list({source.group: source for source in sources}.values())
    for name, source in zip(numbered([each.path for each in entries]), entries, strict=True):
        if source.own == NOTHING_OWN:
            continue
        source.own.over(options, name)
        try:
            check_name(source.own.data_format or AUTO)
            load_preprocess(source.own.preprocess)
        except DataError as error:
            raise of_entry(name, error) from error
        if tokenizer is not None and source.own.chat_template_kwargs:
            try:
                with_template(tokenizer, None, source.own.chat_template_kwargs)
            except TemplateError as error:
                raise of_entry(name, error) from error


class Reading(NamedTuple):
    """With what rows are read."""

    options: Options
    encoder: Encoder | None
    """None without a tokenizer."""
    lint: RowLint | None
    """None without a tokenizer."""


class Readings:
    """Readings of a job's sources, by their numbers; one is made when it is first asked for.

    An encoder compiles the chat template and looks at the whole vocabulary: sources with the same settings share one.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        options: Options,
        own: Mapping[int, OwnReading],
        thread: "Executor | None" = None,
    ) -> None:
        self._tokenizer, self._options, self._own, self._thread = tokenizer, options, own, thread
        self._found: dict[int | None, Reading] = {}
        self._encoders: dict[str, Encoder] = {}
        self._linters: dict[str, RowLint] = {}

    def of(self, source: int) -> Reading:
        """Return the reading of a source."""
        own = self._own.get(source, NOTHING_OWN)
        number = None if own == NOTHING_OWN else source
        if number not in self._found:
            self._found[number] = self._made(own.over(self._options, ""), own.chat_template_kwargs)
        return self._found[number]

    def _made(self, options: Options, arguments: Mapping[str, Any] | None) -> Reading:
        if self._tokenizer is None:
            return Reading(options, None, None)
        learned = {
            "train_on": options.train_on, "turns": options.turns, "arguments": options.chat_template_kwargs,
            "turn_end": options.turn_end, "train_on_turn_end": options.train_on_turn_end,
        }  # fmt: skip
        key = json.dumps(learned, sort_keys=True)
        if key not in self._encoders:
            # As where it is alone: arguments are defaults of the template.
            tokenizer = with_template(self._tokenizer, None, arguments)
            self._encoders[key] = Encoder(tokenizer, thread=self._thread, **learned)  # type: ignore[arg-type]
        if options.train_on not in self._linters:
            self._linters[options.train_on] = RowLint(self._tokenizer, options)
        return Reading(options, self._encoders[key], self._linters[options.train_on])
