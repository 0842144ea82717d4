"""Parsed arguments of each command → its work, its output, and its exit status."""

import json
import logging
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from forge_data._errors import DataError, printable
from forge_data._options import Options, PromptOptions
from forge_data._own_reading import OWN, without_effect
from forge_data._paths import expand_user
from forge_data._shell_values import columns_of, paths_of
from forge_data._values import counted

if TYPE_CHECKING:
    from forge_data.store._prompt_store import PromptStore
    from forge_data.store._token_store import TokenStore

_FIRST_ROWS = 1000
"""Rows of a file that are prepared to show a few."""
_RANGE = re.compile(r"(-?\d+)?:(-?\d+)?")
_SETTING = re.compile(r"`([a-z_]+)`|\b(on_bad_row|on_bad_pair|max_bad_rows)=(?=skip|0\.)")
"""A setting in a message, as this package's errors write it."""
_FLAGS = {
    "chat_template": "--chat-template",
    "chat_template_kwargs": "--chat-template-kwargs",
    "data_path": "DATA",
    "eval_data": "--eval-data",
    "format": "--format",
    "html": "--html",
    "media": "--media",
    "max_prompt_len": "--max-prompt-len",
    "max_seq_len": "--max-seq-len",
    "num_proc": "--num-proc",
    "max_bad_rows": "--max-bad-rows",
    "max_samples": "--max-samples",
    "on_bad_pair": "--on-bad-pair",
    "on_bad_row": "--on-bad-row",
    "on_overflow": "--on-overflow",
    "preprocess": "--preprocess",
    "rename_columns": "--rename-columns",
    "prompts": "--prompts",
    "seed": "--seed",
    "shard": "--shard",
    "system_prompt": "--system-prompt",
    "tokenizer": "--tokenizer",
    "train_on": "--train-on",
    "train_on_turn_end": "--train-on-turn-end",
    "turn_end": "--turn-end",
    "turns": "--turns",
}


def with_flags(message: str) -> str:
    """Name the flags of the command line where a message names settings.

    >>> with_flags("train.jsonl:3: 90 tokens, and `max_seq_len` is 40; raise it")
    'train.jsonl:3: 90 tokens, and --max-seq-len is 40; raise it'
    """
    return _SETTING.sub(lambda found: f"{_FLAGS[found[2]]} " if found[2] else _FLAGS.get(found[1], found[0]), message)


def prepare(words: Namespace) -> int:
    """Make a store of rows, and print what became of them."""
    with _uncounted():
        return _prepare(words)


@contextmanager
def _uncounted() -> Iterator[None]:
    """Disable the log of kept and dropped rows: the command prints them."""
    counts = logging.getLogger("forge_data.accounting")
    before, counts.disabled = counts.disabled, True
    try:
        yield
    finally:
        counts.disabled = before


def _prepare(words: Namespace) -> int:
    from forge_data.preparing._prepare import prepare as make
    from forge_data.preparing._prepare_prompts import prepare_prompts

    where, given = (_data(words, words.data_path), words.tokenizer, words.store_dir), {"seed": words.seed, "shard": words.shard}
    store: TokenStore | PromptStore
    before = _manifest(words.store_dir)
    if words.prompts:
        if words.num_proc is not None:
            raise DataError("`num_proc` is for rows that are learned, and these are `prompts`; leave it out")
        store = prepare_prompts(*where, **_prompt_options(words), max_prompt_len=words.max_prompt_len, **given)
    else:
        if words.max_prompt_len is not None:
            raise DataError("`max_prompt_len` is for `prompts`; give both, or `max_seq_len`")
        store = make(*where, **_options(words), num_proc=words.num_proc, progress=not words.quiet, **given)
    if store.shard is not None:
        _print(str(store.shard))
    _describe(store, before)
    return 0


def merge(words: Namespace) -> int:
    """Join the parts of a store, and print what became of their rows."""
    from forge_data.preparing._merge import merge as join

    before = _manifest(words.store_dir)
    _describe(join(words.store_dir, words.parts), before)
    return 0


def show(words: Namespace) -> int:
    """Show samples on the terminal, or as a page."""
    from forge_data.viewing._show import show as write

    with tempfile.TemporaryDirectory(prefix="forge-data-show-", ignore_cleanup_errors=True) as folder, _uncounted():
        store = _shown(words, Path(folder))
        indices = list(_chosen(store, words.samples)) if words.samples else None
        if words.finding is not None:
            from forge_data.store._token_store import TokenStore

            if not isinstance(store, TokenStore):
                raise DataError(f"{words.store} is a store of prompts, which are not linted; leave --finding out")
            indices = _samples_with(store, words.finding, indices)
        written = write(store, indices, html=words.html)
    if written is not None:
        _print(printable(str(written)))
    return 0


def lint(words: Namespace) -> int:
    """Print findings, as text or JSON; return 1 if any stops a training."""
    from forge_data.linting._lint import lint as check

    data = _data(words, words.data_path)
    if isinstance(data, str):
        data = _store_or_path(data)
    held_out = None if words.eval_data is None else _store_or_path(words.eval_data)
    report = check(data, words.tokenizer, eval_data=held_out, **_options(words))
    text = report.summary() if words.quiet else str(report)
    _print(json.dumps(report.as_dict(), indent=1) if words.json else with_flags(text))
    return 1 if report.stops else 0


def stats(words: Namespace) -> int:
    """Print the numbers of a store, as text or JSON."""
    from forge_data.viewing._show import opened
    from forge_data.viewing._stats import stats as count

    found = count(opened(words.store))
    _print(json.dumps(found.as_dict(), indent=1) if words.json else str(found))
    return 0


def _manifest(store_dir: str) -> bytes | None:
    """Read the manifest of the store in a directory; None where there is none."""
    from forge_data.store._manifest import MANIFEST

    try:
        return (Path(expand_user(store_dir, DataError)) / MANIFEST).read_bytes()
    except OSError:
        return None


def _describe(store: "TokenStore | PromptStore", before: bytes | None) -> None:
    """Print what became of the rows; `before` is the manifest of the store that had this place."""
    from forge_data.store._token_store import TokenStore

    tokens, place = int(store.lengths.sum()), printable(str(store.path))
    if before not in (None, _manifest(str(store.path))):
        _print(f"{place}: replaced the store that was there, of other rows or settings")
    if isinstance(store, TokenStore):
        share = f"{int(store.loss_counts.sum()) / max(1, tokens):.1%}"
        _print(f"{place}: {counted(len(store), 'samples')}, {counted(tokens, 'tokens')}, {share} of them learned")
        _print(str(store.accounting))
        _print(f"lint: {with_flags(str(store.lint))}")
    else:
        _print(f"{place}: {counted(len(store), 'prompts')}, {counted(tokens, 'tokens')}")
        _print(str(store.accounting))
    _print(f"fingerprint {store.fingerprint}")


def _shown(words: Namespace, folder: Path) -> "TokenStore | PromptStore":
    """Open the store that is shown; of rows that are not prepared yet make one in `folder`.

    Raises:
        DataError: options for rows where there is a store, or rows without a tokenizer.
    """
    from forge_data.reading._sources import resolve
    from forge_data.store._manifest import MANIFEST
    from forge_data.viewing._show import opened, store_in

    place, data = store_in(words.store), paths_of([words.store])
    is_entry = not isinstance(data, str)
    if not (place / MANIFEST).is_file() and (words.tokenizer is not None or place.is_file() or is_entry):
        if words.tokenizer is None:
            if place.is_file():
                resolve(data)  # what holds no rows needs no tokenizer
            raise DataError(f"{words.store} is not prepared yet; give a `tokenizer` to see what would be learned of it")
        # The page is headed by the name of its store.
        name = Path(next(iter(data))).name if is_entry else place.resolve().name
        return _prepared(words, _data(words, [words.store]), folder / (name or "rows"))
    defaults = {"tokenizer": None, "prompts": False, **attrs.asdict(Options()), "preprocess": None}
    if given := [name for name, default in defaults.items() if getattr(words, name) not in (default, None)]:
        raise DataError(f"{words.store} is prepared already, and `{given[0]}` is for rows that are not; leave it out")
    return opened(place)


def _prepared(words: Namespace, data: Any, directory: Path) -> "TokenStore | PromptStore":
    """Prepare rows to be shown: the first ones where no sample is asked for."""
    from forge_data.formats._registry import check_name
    from forge_data.preparing._job import Job
    from forge_data.preparing._prepare import build
    from forge_data.preparing._prepare_prompts import prepare_prompts
    from forge_data.reading._preprocess import load_preprocess
    from forge_data.reading._sources import resolve
    from forge_data.tokenizing._chat_template import with_template
    from forge_data.tokenizing._tokenizer import as_tokenizer

    if words.prompts:
        return prepare_prompts(data, words.tokenizer, directory, **_prompt_options(words))
    given = _options(words)
    function = load_preprocess(given.pop("preprocess"))
    options = Options(**given)
    check_name(options.format)
    sources = resolve(data, max_samples=options.max_samples)
    first = [source.rows is None and source.chosen is None for source in sources]
    if words.samples or words.finding is not None:
        first = []
    for number, is_whole in enumerate(first):
        if is_whole:
            sources[number] = attrs.evolve(sources[number], rows=(0, _FIRST_ROWS))
    chosen = with_template(as_tokenizer(words.tokenizer), options.chat_template, options.chat_template_kwargs)
    job = Job(tokenizer=chosen, options=options, preprocess=function)
    store = build(job, sources, directory, num_proc=None, progress=True)
    if store.accounting.read >= _FIRST_ROWS and any(first):
        _print(f"of the first {_FIRST_ROWS:,} rows of each file; name samples, such as 0:5, to read all of them")
    return store


def _data(words: Namespace, given_words: list[str]) -> Any:
    """Read the data sets, which words name.

    Raises:
        DataError: they cannot be read from the words; or an option that each of them has of its own.
    """
    data = paths_of(given_words)
    names, defaults = {own: "format" if own == "data_format" else own for own in OWN}, attrs.asdict(Options())
    given = {own: getattr(words, name, None) for own, name in names.items()}
    others = [own for own, name in names.items() if given[own] not in (None, defaults.get(name))]
    unused = without_effect(others, data, getattr(words, "eval_data", None))
    if unused is not None:
        name, value = names[unused], given[unused]
        shown = " ".join(value) if isinstance(value, list) else value
        raise DataError(f"`{name}` is {shown}, and has no effect: each entry of `data_path` has one of its own; leave it out")
    return data


def _options(words: Namespace) -> dict[str, Any]:
    names = (
        "format", "train_on", "turns", "chat_template", "chat_template_kwargs", "system_prompt", "turn_end",
        "train_on_turn_end", "max_seq_len",
        "on_overflow", "on_bad_pair", "on_bad_row", "max_bad_rows", "max_samples", "media", "preprocess",
    )  # fmt: skip
    columns = None if words.rename_columns is None else columns_of(words.rename_columns)
    return {name: getattr(words, name) for name in names} | {"rename_columns": columns}


def _prompt_options(words: Namespace) -> dict[str, Any]:
    """Return the options of prompts.

    Raises:
        DataError: one is given that only samples have.
    """
    known = {"preprocess", *(field.name for field in attrs.fields(PromptOptions))}
    given, defaults = _options(words), attrs.asdict(Options())
    for name, value in given.items():
        if name not in known and value != defaults[name]:
            raise DataError(f"`{name}` is for rows that are learned, and these are `prompts`; leave it out")
    return {name: value for name, value in given.items() if name in known}


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
