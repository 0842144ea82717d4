"""Entries of `data_path` → path and weight of each, and settings of its own."""

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

import attrs

from forge_data._errors import DataError, ForgeDataError
from forge_data._formats import AUTO, fault_of, is_known
from forge_data._values import describe, nearest, text_given

O = TypeVar("O", bound=attrs.AttrsInstance)  # noqa: E741 - options of any use
E = TypeVar("E", bound=ForgeDataError)

PATH = "path"
"""Name of the path in an entry of a list."""
_WEIGHT = "weight"


@attrs.frozen(kw_only=True)
class OwnReading:
    """Settings that an entry of `data_path` has in place of the run's; None where it has none."""

    data_format: str | None = None
    """Name of the format of its rows."""
    rename_columns: Mapping[str, str] | None = None
    """Columns that its format reads under another name, each with that name."""
    preprocess: str | None = None
    """Function that gets each of its rows first, as package.module:function."""
    train_on: str | None = None
    """What of its rows is learned."""
    train_on_turn_end: str | None = None
    """Which ends of turns are learned."""
    turns: str | None = None
    """In which form turns are learned."""
    system_prompt: str | None = None
    """System message of its conversations that have none."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Arguments of the chat template, beside those of the run that it does not name."""
    on_overflow: str | None = None
    """What becomes of a row that is too long."""
    max_samples: int | None = None
    """Rows that are read of it, the first ones."""
    random_rows: int | float | None = None
    """Rows that are read of it, chosen at random: a share, or from 1 on a number."""
    random_seed: int | None = None
    """Seed that chooses them; 0 by default."""

    def as_dict(self) -> dict[str, Any]:
        """Return what is known of it in a store and its fingerprint."""
        # The first two always, as stores of earlier releases have them.
        early = {"data_format": self.data_format, "rename_columns": self.rename_columns}
        return early | {name: value for name, value in attrs.asdict(self).items() if value is not None}

    def reads_as(self, other: "OwnReading") -> bool:
        """Return whether rows are read alike with another's settings."""
        return attrs.evolve(self, **_ALL_ROWS) == attrs.evolve(other, **_ALL_ROWS)

    def named_in(self, error: ForgeDataError) -> None:
        """Write in the message of a row's error whose settings are meant, where they are these."""
        text = str(error)
        for name, value in attrs.asdict(self).items():
            if value is not None:
                text = text.replace(f"`{name}`", f"{name} of the entry")
        error.args = (text, *error.args[1:])

    def over(self, options: O, path: str) -> O:
        """Return the options of a use with these settings in their place.

        Args:
            options: those of the run.
            path: the entry, for messages.

        Raises:
            DataError: a setting that rows of this use do not have, a value that it may not have, or one that has no effect.
        """
        known = {_IN_OPTIONS.get(field.name, field.name) for field in attrs.fields(type(options))} | _OF_AN_ENTRY
        given = {name: value for name, value in attrs.asdict(self).items() if value is not None}
        for name, value in given.items():
            if _IN_OPTIONS.get(name, name) not in known:
                raise DataError(
                    f"`data_path`: the entry {path} has {name} {value!r}, and rows of this use have no {name} to be chosen; "
                    "take it out"
                )
        given = {name: value for name, value in given.items() if name not in _OF_AN_ENTRY}
        if (arguments := given.get("chat_template_kwargs")) is not None:
            given["chat_template_kwargs"] = {**getattr(options, "chat_template_kwargs", {}), **arguments}
        try:
            return attrs.evolve(options, **{_IN_OPTIONS.get(name, name): value for name, value in given.items()})
        except DataError as error:
            raise of_entry(path, error) from error


def of_entry(path: str, error: E) -> E:
    """Return an error of a data set's own settings with its name.

    Without backticks, in which the command line would see its own flag.
    """
    return type(error)(f"`data_path`: of the entry {path} {str(error).replace('`', '')}")


_ALL_ROWS: dict[str, Any] = {"max_samples": None, "random_rows": None, "random_seed": None}
OF_ENTRIES = ("random_rows", "random_seed")
"""Settings that no run has, and entries alone."""
_OF_AN_ENTRY = {"preprocess", *OF_ENTRIES}
_IN_OPTIONS = {"data_format": "format"}
"""Names of settings that are others in the options."""
OWN = tuple(field.name for field in attrs.fields(OwnReading))
"""Settings that an entry may have of its own."""
_KNOWN = {PATH, _WEIGHT, *OWN}
NOTHING_OWN = OwnReading()
_REFUSED = {
    "chat_template": "a model is asked in one chat template, so that it is one for all data sets",
    "turn_end": "a model ends its answers with one token, so that it is one for all data sets",
    "max_seq_len": "the memory of a step follows from the longest sample of all, so that it is one for all data sets",
    PATH: "here it is the key",
    "type": "here it is data_format",
    "roles_to_train": "here it is train_on",
    "train_on_eos": "here it is train_on_turn_end",
    "train_on_eot": "here it is train_on_turn_end",
    "system": "here it is system_prompt",
    "columns": "here it is rename_columns",
    "num_samples": "here it is random_rows, or max_samples for the first ones",
    "shards": "here it is random_rows, a share",
}
"""Names that an entry may not have, with the reason."""


class Entry(NamedTuple):
    """What is said of a data set."""

    weight: float | None
    """Share in what is trained on; None where none is given."""
    own: OwnReading


def listed(data_sets: object) -> list[tuple[Any, Any]]:
    """List the path of each data set, and the weight or mapping that is given with it.

    >>> listed(["a.jsonl", {"path": "b.jsonl", "weight": 2}]), listed({"a.jsonl": 0.5})
    ([('a.jsonl', {}), ('b.jsonl', {'weight': 2})], [('a.jsonl', 0.5)])
    """
    if isinstance(data_sets, Mapping):
        return list(data_sets.items())
    given = data_sets if isinstance(data_sets, (list, tuple)) else [data_sets]
    return [
        (each.get(PATH), {name: value for name, value in each.items() if name != PATH})
        if isinstance(each, Mapping)
        else (each, {})
        for each in given
    ]


def names_data_sets(given: Sequence[object]) -> bool:
    """Return whether a list that holds mappings is one of data sets, and not of rows.

    Data sets have a `path`, and besides it only what an entry may have, or a setting that no row has as a field.
    """
    mappings = [each for each in given if isinstance(each, Mapping)]
    return all(
        isinstance(each.get(PATH), (str, os.PathLike)) and (each.keys() <= _KNOWN or not each.keys().isdisjoint(OWN))
        for each in mappings
    )


def numbered(names: Sequence[str]) -> list[str]:
    """Return names that differ, with a number where one is there several times.

    >>> numbered(["a.jsonl", "b.jsonl", "a.jsonl"])
    ['a.jsonl#1', 'b.jsonl', 'a.jsonl#2']
    """
    times, at = Counter(names), Counter[str]()
    found = []
    for name in names:
        at[name] += 1
        found.append(f"{name}#{at[name]}" if times[name] > 1 else name)
    return found


def entries_of(data_sets: object) -> list[tuple[str, Entry]]:
    """List data sets with what is said of each: a weight, settings of its own, or nothing.

    Values of the latter are checked where they are used, with those of the run.

    >>> entries_of({"a.jsonl": {"data_format": "alpaca"}, "b.jsonl": {}})[0][1].own.data_format
    'alpaca'

    Raises:
        DataError: something else, naming the data set; or some have a weight and others have none.
    """
    check_shape(data_sets)
    given = [(_path(path), said) for path, said in listed(data_sets)]
    names = numbered([path for path, _ in given])
    found = [(path, _entry(name, said)) for name, (path, said) in zip(names, given, strict=True)]
    weighted = next((each for each in zip(names, found, strict=True) if each[1][1].weight is not None), None)
    without = next((name for name, (_, entry) in zip(names, found, strict=True) if entry.weight is None), None)
    if weighted is not None and without is not None:
        name, (_, entry) = weighted
        raise DataError(
            f"{name} has the weight {entry.weight:g}, and {without} has none; give every path a weight, or no path one"
        )
    return found


def check_shape(data_sets: object) -> None:
    """Refuse an entry of a list that stands alone, and one without a path.

    Raises:
        DataError: with what it has.
    """
    if isinstance(data_sets, Mapping):
        if isinstance(path := data_sets.get(PATH), (str, os.PathLike)):
            raise DataError(
                f"a mapping has paths as its keys, and here {PATH!r} is {os.fspath(path)!r}: put it into a list, "
                f"[{{{PATH}: ..., ...}}], or make the path the key"
            )
        return
    for at, each in enumerate(data_sets if isinstance(data_sets, (list, tuple)) else ()):
        if isinstance(each, Mapping) and PATH not in each:
            near = next((said for name in each if (said := nearest(name, [PATH]))), "")
            raise DataError(
                f"entry {at + 1} has {', '.join(map(repr, each)) or 'nothing'}, and no {PATH}{near}; known: "
                f"{', '.join((PATH, _WEIGHT, *OWN))}"
            )


def misspelt_in(row: Mapping[str, Any]) -> str | None:
    """Say which name is wrong in a mapping that looks like a data set in a list; None for a row.

    >>> misspelt_in({"path": "a.jsonl", "trian_on": "last"})
    "'trian_on', which no data set has; did you mean 'train_on'?"
    >>> misspelt_in({"path": "a.wav", "text": "hello"})
    """
    near = {name: name if name in _KNOWN else next(iter(get_close_matches(str(name), _KNOWN, 1, 0.7)), None) for name in row}
    if None in near.values() or PATH not in near.values():
        return None
    wrong = next((name for name, meant in near.items() if name != meant), None)
    return None if wrong is None else f"{wrong!r}, which no data set has; did you mean {near[wrong]!r}?"


def with_texts(data_sets: Any) -> Any:
    """Return data sets with the text of each system prompt that is given as a file.

    Raises:
        DataError: such a file cannot be read.
    """
    if isinstance(data_sets, Mapping):
        return {path: _with_text(path, value) for path, value in data_sets.items()}
    return tuple(_with_text(each.get(PATH), each) if isinstance(each, Mapping) else each for each in data_sets)


def _with_text(path: object, said: Any) -> Any:
    if not isinstance(said, Mapping) or said.get("system_prompt") is None:
        return said
    return {**said, "system_prompt": _text(str(path), said["system_prompt"])}


def _path(path: object) -> str:
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise DataError(f"an entry has the path {describe(path)}; give each a {PATH}, and what it has of its own")
    return path


def _entry(path: str, value: object) -> Entry:
    if not isinstance(value, Mapping):
        return Entry(_weight(path, value), NOTHING_OWN)
    known = (_WEIGHT, *OWN)
    for name in value:
        if name not in known:
            why = f"; {_REFUSED[str(name)]}" if str(name) in _REFUSED else nearest(name, known)
            raise DataError(f"the entry {path} has {name!r}, which is not known{why}; known: {', '.join(known)}")
    given = {name: each for name, each in value.items() if each is not None}
    weight = _weight(path, given.pop(_WEIGHT)) if _WEIGHT in given else None
    named = given.get("data_format", AUTO)
    if not isinstance(named, str) or not is_known(named):
        raise DataError(f"data_format of the entry {path} is {describe(named)}; {fault_of(named)}")
    _check_columns(path, given.get("rename_columns"))
    if not isinstance(function := given.get("preprocess", ""), str):
        raise DataError(
            f"preprocess of the entry {path} is {describe(function)}; it must name a function as 'package.module:function'"
        )
    if "system_prompt" in given:
        given["system_prompt"] = _text(path, given["system_prompt"])
    if not isinstance(arguments := given.get("chat_template_kwargs", {}), Mapping):
        raise DataError(
            f"chat_template_kwargs of the entry {path} is {describe(arguments)}; it must be an object of arguments' names and "
            "values"
        )
    _check_rows(path, given)
    return Entry(weight, OwnReading(**given))


def _check_rows(path: str, given: Mapping[str, Any]) -> None:
    rows, seed, most = (given.get(name) for name in ("random_rows", "random_seed", "max_samples"))
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise DataError(f"max_samples of the entry {path} is {describe(most)}; it must be a whole number of at least 1")
    number = isinstance(rows, (int, float)) and not isinstance(rows, bool)
    if rows is not None and not (number and (rows >= 1 if isinstance(rows, int) else 0 < rows < 1)):
        raise DataError(
            f"random_rows of the entry {path} is {describe(rows)}; it must be a share between 0 and 1, or a whole number"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise DataError(f"random_seed of the entry {path} is {describe(seed)}; it must be a whole number of at least 0")
    if seed is not None and rows is None:
        raise DataError(f"random_seed of the entry {path} has no effect without random_rows; give both, or leave it out")
    if rows is not None and most is not None:
        raise DataError(f"the entry {path} has random_rows and max_samples, which both choose its rows; give one of them")


def _text(path: str, value: object) -> Any:
    try:
        return text_given(value)
    except ValueError as error:
        raise DataError(f"system_prompt of the entry {path} {error}") from error


def _weight(path: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight <= 0:
        raise DataError(
            f"the weight of {path} is {describe(weight)}; it must be a number above 0, or the entry taken out"
            + ("" if isinstance(weight, (int, float)) else " (a mapping gives files their weights; one row is given as [row])")
        )
    return float(weight)


def _check_columns(path: str, columns: object) -> None:
    if columns is None:
        return
    if not isinstance(columns, Mapping) or not columns:
        raise DataError(
            f"rename_columns of the entry {path} is {describe(columns)}; it must be a mapping of columns to the names of fields"
        )
    for name in (*columns, *columns.values()):
        if not isinstance(name, str) or not name:
            raise DataError(f"rename_columns of the entry {path} holds {describe(name)}; columns and fields have names")


def without_effect(given: Collection[str], *data_sets: object) -> str | None:
    """Return the first of the run's settings that every data set has of its own.

    It would have no effect. The run's arguments of the chat template have one: they are stored with the model.

    Args:
        given: settings that are not as by default, by their names in `OwnReading`.
        data_sets: what is trained on, and what is held out; None where there is none.
    """
    entries = [entry.own for each in data_sets if each is not None for _, entry in entries_of(each)]
    return next(
        (
            name
            for name in OWN
            if name != "chat_template_kwargs" and name in given and all(getattr(own, name) is not None for own in entries)
        ),
        None,
    )
