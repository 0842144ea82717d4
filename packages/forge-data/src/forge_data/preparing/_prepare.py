"""Rows of whatever files to a token store: read, understood, tokenised, counted, written, looked over."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from forge_data._errors import DataError, StoreError
from forge_data._options import Options
from forge_data._paths import at_home
from forge_data.formats import _registry as _formats
from forge_data.linting._lint import store_findings
from forge_data.preparing._fingerprint import check_stamps, fingerprint_of_inputs, stamps_of
from forge_data.preparing._job import Job
from forge_data.preparing._pipeline import Outcome, run
from forge_data.preparing._progress import Progress, teller, wanted
from forge_data.reading._preprocess import load_preprocess
from forge_data.reading._sources import DataPath, Source, resolve
from forge_data.store._base import Stored
from forge_data.store._manifest import own_files
from forge_data.store._partial import remove_leftovers
from forge_data.store._publish import require_room
from forge_data.store._token_store import TokenStore
from forge_data.store._writer import StoreWriter
from forge_data.tokenizing._tokenizer import as_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("forge_data")
S = TypeVar("S", bound=Stored)


def prepare(
    data_path: DataPath,
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]",
    store_dir: str | os.PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - what it is called everywhere else
    train_on: str = "assistant",
    max_seq_len: int | None = None,
    on_overflow: str = "drop",
    on_bad_pair: str = "error",
    preprocess: str | Callable[[dict[str, Any]], Any] | None = None,
    num_proc: int | None = None,
    seed: int = 0,
    progress: Progress = True,
) -> TokenStore:
    """The rows of some files as a token store in `store_dir`.

    A store that was made there from the same content, tokenizer, template and settings is opened again; one that was made
    from others is replaced when the new one is whole. Rows that are left out are counted by reason, and said. If anything
    fails, `store_dir` is as it was.

    Args:
        data_path: a file, glob, directory, URL or `name:split`; a list of them; or a mapping of them to their weights.
        tokenizer: a loaded tokenizer, a directory or a name on the hub.
        store_dir: where the store is to be: nothing, an empty directory, or a token store.
        format: name of the rows' format; "auto" tells it from the rows, which must all have one.
        train_on: `assistant` learns every assistant turn, `last` the last one, `completion` the completions of
            prompt/completion rows, `all` every token.
        max_seq_len: longest sample in tokens; no limit by default.
        on_overflow: what becomes of a longer row: `drop`, `truncate`, `split` or `error`.
        on_bad_pair: what becomes of a row of preferences that prefers nothing (equal answers, two prompts, an empty answer):
            `error`, or `skip`, which leaves it out and counts it by its reason.
        preprocess: a function of a row's fields, or its name as "package.module:function", that gives the row to use, a list
            of rows, or None to leave it out; it runs before anything else looks at the row.
        num_proc: processes that tokenise, of one thread each. By default this machine is used as it best can be: for little data
            this process alone, in which the tokenizer has its own threads (as `TOKENIZERS_PARALLELISM` allows); for more a
            process for each core that this one may use, up to 16. The store is the same, byte for byte, in every case.
        seed: what `store.split` draws by where it is given no other.
        progress: a line on a terminal, or nothing, or a callable that gets (row reached, last row).

    Raises:
        DataError: a file, or a row of it by `file:row`; no row that can be trained on.
        TemplateError: no chat template, or one that leaves open which tokens the assistant wrote.
        TokenizerError: no tokenizer there, or one without offsets.
        StoreError: `store_dir` holds something else, or cannot be written.
    """
    options = Options(
        format=format, train_on=train_on, max_seq_len=max_seq_len, on_overflow=on_overflow, on_bad_pair=on_bad_pair
    )
    _formats.check_name(format)
    check_whole("num_proc", num_proc, at_least=1)
    check_whole("seed", seed)
    function = load_preprocess(preprocess)
    directory = place_for(store_dir)
    sources = resolve(data_path)
    job = Job(tokenizer=as_tokenizer(tokenizer), options=options, preprocess=function)
    return build(job, sources, directory, num_proc=num_proc, seed=seed, progress=progress)


def build(
    job: Job, sources: list[Source], directory: Path, *, num_proc: int | None, seed: int = 0, progress: Progress = False
) -> TokenStore:
    """The store of some sources: the one that is there where it was made from the same, else a new one."""
    stamps = stamps_of(sources)
    inputs = fingerprint_of_inputs(sources, job.tokenizer, job.options, job.preprocess, seed)
    remove_leftovers(directory)
    there = reusable(TokenStore, directory, inputs)
    if there is not None:
        return there
    counts = [source.count() for source in sources] if wanted(progress) else []
    last = sum(count for count in counts if count is not None) if counts and None not in counts else None
    with teller(progress, last) as tell, StoreWriter(directory) as writer:
        outcome = run(job, sources, writer, num_proc, tell)
        check_stamps(sources, stamps)
        accounting = outcome.accounting(writer)
        if not writer.samples:
            raise DataError(_nothing_left(sources, outcome, str(accounting), job.options))
        manifest = writer.finish(
            outcome.kind,
            outcome.files(sources),
            accounting,
            tokenizer=job.tokenizer,
            inputs=inputs,
            settings=_settings(job, outcome, seed),
        )
        outcome.findings.add(store_findings(TokenStore(writer.partial, manifest)))
        try:
            writer.commit(manifest, outcome.findings.report(accounting.read).dumps())
        except StoreError:
            # Several processes may prepare the same store at once, as ranks do; all of them want the one that is there.
            there = reusable(TokenStore, directory, inputs)
            if there is None:
                raise
            return there
    if accounting.dropped or accounting.tokens_lost:
        _log.warning("%s: %s", ", ".join(source.name for source in sources[:3]), accounting)
    return TokenStore.open(directory)


def place_for(store_dir: str | os.PathLike[str]) -> Path:
    """Where a store is to be, once it is known that it may be there.

    Raises:
        StoreError: something else is there.
    """
    directory = at_home(store_dir, StoreError)
    if directory.is_symlink():
        # The store is renamed into its place: the link is to stay, and what it leads to is to be replaced.
        directory = directory.resolve()
    require_room(directory)
    return directory


def reusable(kind: type[S], directory: Path, inputs: str | None) -> S | None:
    """The store that is there, if it is whole and was made from the same."""
    ours = own_files(directory)
    if inputs is None or ours is None:
        return None
    try:
        store = kind.open(directory)
        if store.inputs != inputs:
            return None
        # What is damaged is made anew, as its own errors ask for; to read the store costs no more than its sources just did.
        store.verify()
    except (StoreError, OSError):
        return None
    return store


def _settings(job: Job, outcome: Outcome, seed: int) -> dict[str, Any]:
    named = job.tokenizer.name_or_path if job.tokenizer is not None else None
    function = job.preprocess.name if job.preprocess is not None else None
    options = attrs.asdict(job.options) | {"format": outcome.format_name or job.options.format}
    return {"tokenizer": named, **options, "preprocess": function, "seed": seed}


def check_whole(name: str, value: object, at_least: int | None = None) -> None:
    """Refuse what is no whole number, or too small a one.

    Raises:
        DataError: naming the argument.
    """
    if value is None and name != "seed":
        return
    if isinstance(value, bool) or not isinstance(value, int) or (at_least is not None and value < at_least):
        limit = f" of at least {at_least}" if at_least is not None else ""
        raise DataError(f"{name} must be a whole number{limit}, got {value!r}")


def _nothing_left(sources: list[Source], outcome: Outcome, told: str, options: Options) -> str:
    paths = ", ".join(source.path for source in sources[:3]) + (" and more" if len(sources) > 3 else "")
    told = f"{paths}: no row is left to train on: {told}"
    if outcome.shortest_too_long is not None:
        return (
            f"{told}; the shortest that was too long has {outcome.shortest_too_long} tokens, max_seq_len is "
            f"{options.max_seq_len}: raise it"
        )
    return f"{told}; rows need an assistant turn, a completion, or labels that are not -100"
