"""Rows of files → token store: read, tokenised, counted, written, linted."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from forge_data._accounting import Accounting
from forge_data._errors import DataError, StoreError
from forge_data._options import Options
from forge_data._own_reading import NOTHING_OWN
from forge_data._paths import expand_user
from forge_data._settings import MAX_BAD_ROWS
from forge_data._shard import Shard
from forge_data._values import counted
from forge_data.chat_template._asked import SWITCHES, as_form
from forge_data.formats._registry import check_name
from forge_data.linting._lint import store_findings
from forge_data.linting._readings import check_own
from forge_data.masking._conversation import AS_HISTORY
from forge_data.masking._train_on import roles_of
from forge_data.preparing._fingerprint import check_stamps, fingerprint_of_inputs, stamps_of
from forge_data.preparing._job import Job
from forge_data.preparing._pipeline import Outcome, run
from forge_data.preparing._progress import Progress, is_shown, reporter
from forge_data.reading._preprocess import load_preprocess
from forge_data.reading._sources import DataPath, Source, part_of, resolve
from forge_data.store._base import Store
from forge_data.store._manifest import own_files
from forge_data.store._partial import remove_leftovers
from forge_data.store._publish import require_room
from forge_data.store._token_store import TokenStore
from forge_data.store._writer import StoreWriter
from forge_data.tokenizing._chat_template import with_template
from forge_data.tokenizing._tokenizer import as_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("forge_data")
_counts = logging.getLogger("forge_data.accounting")
"""Apart, so that a caller who prints `store.accounting` can disable it."""
S = TypeVar("S", bound=Store)


def prepare(
    data_path: DataPath,
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]",
    store_dir: str | os.PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - what it is called everywhere else
    train_on: str = "assistant",
    turns: str = "auto",
    chat_template: str | os.PathLike[str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    turn_end: str | None = None,
    train_on_turn_end: str = "turn",
    max_seq_len: int | None = None,
    on_overflow: str = "drop",
    on_bad_pair: str = "error",
    preprocess: str | Callable[[dict[str, Any]], Any] | None = None,
    rename_columns: Mapping[str, str] | None = None,
    on_bad_row: str = "error",
    max_bad_rows: float = MAX_BAD_ROWS,
    max_samples: int | None = None,
    media: bool = False,
    num_proc: int | None = None,
    seed: int = 0,
    shard: str | None = None,
    progress: Progress = True,
) -> TokenStore:
    """Write the rows of files as a token store in `store_dir`.

    A store that was made there from the same content, tokenizer, template and settings is opened again; one that was made from
    others is replaced when the new one is complete. Rows that are left out are counted by reason, and logged. If anything
    fails, `store_dir` is as it was.

    Args:
        data_path: a file, glob, directory, URL or `name:split`; a list of them; or a mapping of them to their weights, or to
            a mapping of a `weight` and of settings of their own, such as `data_format` in place of `format`; or a list of such
            mappings, each with its `path`, in which one file may be read in several ways. Or rows in memory: a
            `datasets.Dataset`, a list of dicts, any iterable of them, streamed where it is an iterator.
        tokenizer: a loaded tokenizer, a directory or a name on the Hub.
        store_dir: directory of the store: missing, empty, or a token store.
        format: name of the rows' format; "auto" detects it from the rows, which must have one in each file.
        train_on: `assistant` learns every assistant turn, `last` the last one, `completion` the completions of
            prompt/completion rows, `all` every token.
        turns: in which form turns are learned. `auto` learns each turn in the context in which the model will be asked for it:
            one sample where the conversation's text extends each of its prompts, else one for each learned turn. `history`
            learns the text of the whole conversation, in which a template may write earlier turns otherwise than it asks for
            them; the lint says where.
        chat_template: a file of a chat template, or the name of one of the tokenizer's, in place of its own. The store's
            tokenizer has it.
        chat_template_kwargs: arguments of the chat template for rows that do not give them. They are defaults of the template
            that the store's tokenizer has.
        system_prompt: first message, of the role system, of conversations that have no system message: a text, or `file:PATH`
            of one. Text and token ids stay as they are.
        turn_end: token that ends a learned turn for which the template writes no end. By default one of the model's EOS list
            (generation_config.json or config.json beside the tokenizer) with which the next message begins.
        train_on_turn_end: which ends of turns are learned: `turn` that of each learned turn, `all` every message's, `last` that
            of a row's last learned turn, or `none`. Of text it is the EOS, which `none` leaves out.
        max_seq_len: longest sample in tokens; no limit by default.
        on_overflow: what becomes of a longer row: `drop`, `truncate`, `split` or `error`.
        on_bad_pair: what becomes of a row of preferences that prefers nothing (equal answers, two prompts, an empty answer):
            `error`, or `skip`, which leaves it out and counts it by reason.
        preprocess: a function of a row's fields, or its name as "package.module:function", that returns the row to use, a list
            of rows, or None to leave it out; it runs before anything else reads the row.
        rename_columns: columns that a format reads under another name, each with that name, such as
            {"question": "prompt", "answer": "completion"}; renamed after `preprocess`.
        on_bad_row: what becomes of a row that is refused, whatever for: `error`, or `skip`, which leaves it out, counts it by
            reason and lists it with its error in `dropped()`; with it a row whose every answer is empty.
        max_bad_rows: share of the rows that `on_bad_row="skip"` may leave out.
        max_samples: rows of each entry of `data_path` that are read, the first ones; all by default.
        media: whether the rows may have images, as `forge sft` and `dpo` train them; a row with one is refused otherwise.
        num_proc: processes that tokenise, of one thread each. By default the machine is used as well as it can be: for little
            data this process alone, in which the tokenizer has its own threads (as `TOKENIZERS_PARALLELISM` allows); for more,
            one process for each core that this one may use, up to 16. The store is the same, byte for byte, in every case.
        seed: seed of `store.split` where it is given no other.
        shard: "3/16" prepares the third of sixteen equal parts of all rows, which `store.shard` names; `merge` joins them.
        progress: True for a line on a terminal, False for nothing, or a callable that gets (row reached, last row).

    Raises:
        DataError: a file, or a row of it by `file:row`; no row that can be trained on.
        TemplateError: no chat template, or one that leaves open which tokens the assistant wrote.
        TokenizerError: no tokenizer there, or one without offsets.
        StoreError: `store_dir` holds something else, or cannot be written.
    """
    options = Options(
        format=format,
        train_on=train_on,
        turns=turns,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
        turn_end=turn_end,
        train_on_turn_end=train_on_turn_end,
        max_seq_len=max_seq_len,
        on_overflow=on_overflow,
        on_bad_pair=on_bad_pair,
        rename_columns=rename_columns,
        on_bad_row=on_bad_row,
        max_bad_rows=max_bad_rows,
        max_samples=max_samples,
        media=media,
    )
    check_name(format)
    check_whole("num_proc", num_proc, at_least=1)
    check_whole("seed", seed)
    function = load_preprocess(preprocess)
    directory = checked_directory(store_dir)
    sources = resolve(data_path, max_samples=max_samples)
    part = Shard.parse(shard) if shard is not None else None
    chosen = with_template(as_tokenizer(tokenizer), options.chat_template, options.chat_template_kwargs)
    job = Job(tokenizer=chosen, options=options, preprocess=function)
    return build(job, sources, directory, num_proc=num_proc, seed=seed, shard=part, progress=progress)


def build(
    job: Job,
    sources: list[Source],
    directory: Path,
    *,
    num_proc: int | None,
    seed: int = 0,
    shard: Shard | None = None,
    progress: Progress = False,
) -> TokenStore:
    """Make the store of sources, or of a part; open the one there if it was made from the same."""
    job = attrs.evolve(job, own={number: each.own for number, each in enumerate(sources) if each.own != NOTHING_OWN})
    check_own(sources, job.options, job.tokenizer)
    stamps = stamps_of(sources)
    inputs = fingerprint_of_inputs(sources, job.tokenizer, job.options, job.preprocess, seed)
    whole = None
    if shard is not None:
        whole = sources
        sources, shard = known_part(sources, shard, inputs)
    remove_leftovers(directory)
    existing = reusable(TokenStore, directory, inputs, shard, sources)
    if existing is not None:
        return existing
    counts = [source.count() for source in sources] if is_shown(progress) and shard is None else []
    last = sum(count for count in counts if count is not None) if counts and None not in counts else None
    with reporter(progress, last) as report_row, StoreWriter(directory) as writer:
        outcome = run(job, sources, writer, num_proc, report_row, whole)
        check_stamps(sources, stamps)
        accounting = outcome.accounting(writer)
        if not writer.samples and shard is None:
            raise DataError(_nothing_left(sources, outcome, str(accounting), job.options))
        if job.options.turn_end and shard is None and not any(form.startswith("turn_end=") for form in accounting.forms):
            raise DataError(
                f"`turn_end` ({job.options.turn_end!r}) has no effect: no learned turn of these rows lacks an end, since their "
                "chat template writes one, or none of them is a conversation; leave it out"
            )
        if shard is None:
            check_system_prompts(job.options.system_prompt, sources, outcome.conversations, set(+outcome.kept))
        manifest = writer.finish(
            outcome.first[0] if outcome.first else None,
            outcome.files(sources),
            accounting,
            # Only all parts together tell how all rows were rendered.
            tokenizer=job.tokenizer if shard or job.tokenizer is None else as_trained(job.tokenizer, accounting),
            inputs=inputs,
            settings=_settings(job, sources, outcome, seed),
            shard=shard,
        )
        if writer.samples:
            outcome.findings.add(store_findings(TokenStore(writer.partial, manifest)))
        try:
            writer.commit(manifest, outcome.findings.report(accounting.read).dumps())
        except StoreError:
            # Several processes may prepare the same store at once, as ranks do; all of them use the one that is there.
            existing = reusable(TokenStore, directory, inputs, shard, sources)
            if existing is None:
                raise
            return existing
    names = ", ".join(source.name for source in sources[:3])
    if accounting.dropped or accounting.tokens_lost or accounting.forms:
        level = logging.WARNING if accounting.dropped or accounting.tokens_lost else logging.INFO
        _counts.log(level, "%s: %s", names, accounting)
    if AS_HISTORY in accounting.forms:
        _log.warning(
            "%s: %s with turns that are learned as the whole conversation's text has them, which is not how the model will "
            "be asked for each of them: the lint's not_as_prompted names them (turns=auto learns each turn as it is asked for)",
            names,
            counted(accounting.forms[AS_HISTORY], "rows"),
        )
    return TokenStore.open(directory)


def check_system_prompts(
    prompt: str | None, sources: Sequence[Source], conversations: AbstractSet[int], kept: AbstractSet[int]
) -> None:
    """Refuse a system prompt of the run or an entry without any conversation.

    Args:
        prompt: of the run.
        sources: rows.
        conversations: numbers of the sources that have conversations, where a system prompt is given for them.
        kept: numbers of the sources of which a row is kept; an entry of which none is says nothing of its rows.

    Raises:
        DataError: naming the entry, of one of its own.
    """
    asked: dict[int | None, list[int]] = {}
    for number, source in enumerate(sources):
        asked.setdefault(None if source.own.system_prompt is None else source.group, []).append(number)
    for group, numbers in asked.items():
        if (group is None and prompt is None) or not conversations.isdisjoint(numbers):
            continue
        if group is not None and kept.isdisjoint(numbers):
            continue
        first = sources[numbers[0]].path
        name, rows = "`system_prompt`", f"all rows, of {first} and others," if len(numbers) > 1 else f"all rows of {first}"
        if group is not None:
            name, rows = f"`data_path`: of the entry {sources[numbers[0]].name} the system_prompt", "all of its rows"
        raise DataError(
            f"{name} has no effect: {rows} are text or token ids, and only a conversation has a system message; make the rows "
            "messages, or leave it out"
        )


def known_part(sources: list[Source], shard: Shard, inputs: str | None) -> tuple[list[Source], Shard]:
    """Restrict sources to a part, as `part_of` does, where `merge` can tell what the part is of.

    Raises:
        DataError: the rows are read only once, or a function of theirs has no identity; or a source cannot be read.
    """
    if inputs is None:
        raise DataError(
            "`shard` prepares a part of rows that can be read again, and which merge knows again: give files, a list or a "
            "Dataset, and a preprocess that is a function of a module"
        )
    return part_of(sources, shard)


def checked_directory(store_dir: str | os.PathLike[str]) -> Path:
    """Return the directory of a store, once it is known that it may be there.

    Raises:
        StoreError: something else is there.
    """
    directory = expand_user(store_dir, StoreError)
    if directory.is_symlink():
        # The store is renamed into its place: the link stays, and its target is replaced.
        directory = directory.resolve()
    require_room(directory)
    return directory


def reusable(
    kind: type[S], directory: Path, inputs: str | None, shard: Shard | None = None, sources: Sequence[Source] = ()
) -> S | None:
    """Open the store that is there, if it is complete and was made from the same.

    Of rows with images in the same place too, and from the same images: equal rows name others elsewhere.
    """
    if inputs is None or own_files(directory) is None:
        return None
    try:
        store = kind.open(directory)
        if store.inputs != inputs or store.shard != shard:
            return None
        # A damaged store is made anew, as its errors ask for; reading it costs no more than reading its sources did.
        store.verify()
        if store.has_media and not _shows_media(store, sources):
            return None
    except (StoreError, OSError):
        return None
    return store


def _shows_media(store: Store, sources: Sequence[Source]) -> bool:
    """Tell whether a store has the images that rows of sources name now."""
    return store.media_directories == [each.directory for each in sources] and store.media_are_there()


def as_trained(tokenizer: "PreTrainedTokenizerBase", accounting: Accounting) -> "PreTrainedTokenizerBase":
    """Return the tokenizer that asks as the rows were rendered: thinking on, or off, by default."""
    every = {form for form, count in accounting.forms.items() if count == accounting.kept}
    arguments = {name: value for name in SWITCHES for value in (False, True) if as_form(name, value) in every}
    mixed = any(as_form(name, not value) in accounting.forms for name, value in arguments.items())
    return with_template(tokenizer, None, None if mixed else arguments)


def own_settings(sources: Sequence[Source]) -> dict[str, Any]:
    """Return what sources have of their own, by path; of one that is read several times by name."""
    times = Counter(source.path for source in sources)
    return {
        source.path if times[source.path] == 1 else source.name: source.own.as_dict()
        for source in sources
        if source.own != NOTHING_OWN
    }


def _settings(job: Job, sources: Sequence[Source], outcome: Outcome, seed: int) -> dict[str, Any]:
    named = job.tokenizer.name_or_path if job.tokenizer is not None else None
    function = job.preprocess.name if job.preprocess is not None else None
    formats = dict.fromkeys(name for name, _ in outcome.formats.values())
    options = attrs.asdict(job.options) | {"format": ", ".join(formats) or job.options.format}
    own = own_settings(sources)
    return {"tokenizer": named, **options, "preprocess": function, "seed": seed} | ({"own": own} if own else {})


def check_whole(name: str, value: object, at_least: int | None = None) -> None:
    """Refuse what is not a whole number, or too small.

    Raises:
        DataError: naming the argument.
    """
    if value is None and name != "seed":
        return
    if isinstance(value, bool) or not isinstance(value, int) or (at_least is not None and value < at_least):
        limit = f" of at least {at_least}" if at_least is not None else ""
        raise DataError(f"`{name}` must be a whole number{limit}, got {value!r}")


def _nothing_left(sources: list[Source], outcome: Outcome, accounting: str, options: Options) -> str:
    paths = ", ".join(source.path for source in sources[:3]) + (" and more" if len(sources) > 3 else "")
    what = f"{paths}: no row is left to train on: {accounting}"
    if outcome.shortest_too_long is not None:
        return (
            f"{what}; the shortest that was too long has {outcome.shortest_too_long} tokens, `max_seq_len` is "
            f"{options.max_seq_len}: raise it"
        )
    if options.train_on != "assistant" and (named := sorted(roles_of(options.train_on))):
        return f"{what}; `train_on` is {options.train_on!r}, and no message of {' or '.join(named)} says anything"
    return f"{what}; rows need an assistant turn, a completion, or labels that are not -100"
