"""Parsed arguments of each command → its work, its output, and its exit status."""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forge_data._errors import DataError, printable
from forge_data._paths import expand_user

if TYPE_CHECKING:
    from forge_data.store._prompt_store import PromptStore
    from forge_data.store._token_store import TokenStore

_RANGE = re.compile(r"(-?\d+)?:(-?\d+)?")
_SETTING = re.compile(r"`([a-z_]+)`")
"""A setting in a message, as this package's errors write it."""
_FLAGS = {
    "chat_template": "--chat-template",
    "chat_template_kwargs": "--chat-template-kwargs",
    "data_path": "DATA",
    "eval_data": "--eval-data",
    "format": "--format",
    "html": "--html",
    "max_seq_len": "--max-seq-len",
    "num_proc": "--num-proc",
    "on_bad_pair": "--on-bad-pair",
    "on_overflow": "--on-overflow",
    "preprocess": "--preprocess",
    "seed": "--seed",
    "tokenizer": "--tokenizer",
    "train_on": "--train-on",
    "turn_end": "--turn-end",
    "turns": "--turns",
}


def with_flags(message: str) -> str:
    """Name the flags of the command line where a message names settings.

    >>> with_flags("train.jsonl:3: 90 tokens, and `max_seq_len` is 40; raise it")
    'train.jsonl:3: 90 tokens, and --max-seq-len is 40; raise it'
    """
    return _SETTING.sub(lambda found: _FLAGS.get(found[1], found[0]), message)


def prepare(words: Namespace) -> int:
    """Make a store of rows, and print what became of them."""
    from forge_data.preparing._prepare import prepare as make

    data: Any = words.data_path if len(words.data_path) > 1 else words.data_path[0]
    if words.weights is not None:
        if len(words.weights) != len(words.data_path):
            raise DataError(f"--weights has {len(words.weights)} numbers for {len(words.data_path)} of DATA; give one for each")
        data = dict(zip(words.data_path, words.weights, strict=True))
    store = make(
        data,
        words.tokenizer,
        words.store_dir,
        **_options(words),
        num_proc=words.num_proc,
        seed=words.seed,
        progress=not words.quiet,
    )
    tokens, learned = int(store.lengths.sum()), int(store.loss_counts.sum())
    report = store.lint
    _print(f"{printable(str(store.path))}: {len(store):,} samples, {tokens:,} tokens, {learned / tokens:.1%} of them learned")
    _print(str(store.accounting))
    _print(f"lint: {report.stops:,} stops, {report.warnings:,} warnings")
    _print(f"fingerprint {store.fingerprint}")
    return 0


def show(words: Namespace) -> int:
    """Show samples on the terminal, or as a page."""
    from forge_data.viewing._show import opened, show as write

    store = opened(words.store)
    indices = list(_chosen(store, words.samples)) if words.samples else None
    if words.finding is not None:
        from forge_data.store._token_store import TokenStore

        if not isinstance(store, TokenStore):
            raise DataError(f"{store.path} is a store of prompts, which are not linted; leave --finding out")
        indices = _samples_with(store, words.finding, indices)
    written = write(store, indices, html=words.html)
    if written is not None:
        _print(printable(str(written)))
    return 0


def lint(words: Namespace) -> int:
    """Print findings, as text or JSON; return 1 if any stops a training."""
    from forge_data.linting._lint import lint as check

    data: Any = words.data_path if len(words.data_path) > 1 else words.data_path[0]
    if isinstance(data, str):
        data = _store_or_path(data)
    held_out = None if words.eval_data is None else _store_or_path(words.eval_data)
    report = check(data, words.tokenizer, eval_data=held_out, **_options(words))
    _print(json.dumps(report.as_dict(), indent=1) if words.json else with_flags(str(report)))
    return 1 if report.stops else 0


def stats(words: Namespace) -> int:
    """Print the numbers of a store, as text or JSON."""
    from forge_data.viewing._show import opened
    from forge_data.viewing._stats import stats as count

    counted = count(opened(words.store))
    _print(json.dumps(counted.as_dict(), indent=1) if words.json else str(counted))
    return 0


def _options(words: Namespace) -> dict[str, Any]:
    names = (
        "format", "train_on", "turns", "chat_template", "chat_template_kwargs", "turn_end", "max_seq_len", "on_overflow",
        "on_bad_pair", "preprocess",
    )  # fmt: skip
    return {name: getattr(words, name) for name in names}


def _store_or_path(path: str) -> "TokenStore | str":
    from forge_data.store._manifest import MANIFEST, holds_prompts
    from forge_data.store._token_store import TokenStore

    directory = expand_user(path, DataError)
    if holds_prompts(directory):
        raise DataError(f"{path} is a store of prompts: nothing of them is learned, so there is nothing to lint")
    return TokenStore.open(path) if (directory / MANIFEST).is_file() else path


def _chosen(store: "TokenStore | PromptStore", wanted: list[str]) -> Iterator[int]:
    """Find the indices that words name: numbers, ranges, rows of source files.

    Raises:
        DataError: a word that names none.
    """
    from forge_data.viewing._view import chosen_indices

    places: dict[str, list[int]] = {}
    for word in wanted:
        if word.removeprefix("-").isdecimal():
            yield int(word)
        elif (span := _RANGE.fullmatch(word)) and word != ":":
            start, stop = (None if edge is None else int(edge) for edge in span.groups())
            yield from chosen_indices(store, slice(start, stop), len(store))
        else:
            # Made once and only if needed: it takes the place of every sample.
            places = places or _samples_by_place(store)
            if word not in places:
                raise DataError(
                    f"no sample came from {word!r}; the first came from {store.source(0)!r}, and rows that were left out are "
                    f"in {store.path / 'dropped.jsonl'}"
                )
            yield from places[word]


def _samples_with(store: "TokenStore", rule: str, indices: list[int] | None) -> list[int]:
    if rule not in store.lint.counts:
        found = ", ".join(store.lint.counts) or "nothing"
        raise DataError(f"the lint found no {rule!r} in {store.path}; it found {found}")
    rows = {finding.place for finding in store.lint.findings if finding.rule == rule}
    found = [index for index in (range(len(store)) if indices is None else indices) if store.source(index) in rows]
    if not found:
        where = ", ".join(sorted(rows)[:3]) + (" and more" if len(rows) > 3 else "")
        which = "none of these samples is" if indices is not None else "no sample of the store is"
        raise DataError(
            f"{which} of a row on which the lint found {rule!r}; it found that on {where}. Rows that were left out are in "
            f"{store.path / 'dropped.jsonl'}"
        )
    return found


def _samples_by_place(store: "TokenStore | PromptStore") -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for index in range(len(store)):
        places.setdefault(store.source(index), []).append(index)
    return places


def _print(text: str) -> None:
    from forge_data.viewing._show import write_line

    write_line(sys.stdout, text)
