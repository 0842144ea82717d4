"""Rows of files → token store of a student, with a teacher's tokens of the same rows.

Both are prepared as `prepare` does, each with its own tokenizer and chat template; then the rows are aligned.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forge_data._errors import DataError, TemplateError
from forge_data._options import Options
from forge_data._settings import MAX_BAD_ROWS
from forge_data.aligning._align import Aligned, Sample, align
from forge_data.aligning._spelling import Spelling
from forge_data.formats._registry import check_name
from forge_data.preparing._fingerprint import fingerprint_of_inputs
from forge_data.preparing._job import Job
from forge_data.preparing._prepare import build, check_whole, checked_directory, reusable
from forge_data.preparing._progress import Progress
from forge_data.reading._preprocess import load_preprocess
from forge_data.reading._sources import DataPath, Source, resolve
from forge_data.store._manifest import (
    SPAN_OFFSETS,
    SPANS,
    SUPERVISED,
    TEACHER_IDS,
    TEACHER_OFFSETS,
    TEACHER_RUNS,
    TEACHER_STARTS,
)
from forge_data.store._partial import partial_of, remove_leftovers
from forge_data.store._token_store import TokenStore
from forge_data.store._writer import StoreWriter
from forge_data.tokenizing._chat_template import arguments_read, with_template
from forge_data.tokenizing._tokenizer import as_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_AT_ONCE = 256
"""Samples whose alignments are written together."""


def prepare_taught(
    data_path: DataPath,
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]",
    teacher: "PreTrainedTokenizerBase | str | os.PathLike[str]",
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
    preprocess: str | Callable[[dict[str, Any]], Any] | None = None,
    rename_columns: Mapping[str, str] | None = None,
    on_bad_row: str = "error",
    max_bad_rows: float = MAX_BAD_ROWS,
    max_samples: int | None = None,
    num_proc: int | None = None,
    seed: int = 0,
    progress: Progress = True,
) -> TokenStore:
    """Write rows as a token store with the tokens of a teacher that has another tokenizer.

    The samples are those of `prepare`. The teacher reads the same rows in its own chat template: `store.taught(i)` are its
    tokens of sample i, and the spans of the learned text that both tokenizers cut at the same places. `store.settings` has
    under `alignment` how much of the learned text they are. A store that was made from the same is opened again.

    Args:
        data_path: as in `prepare`; rows in memory that can be read once only are refused.
        tokenizer: of the student.
        teacher: its tokenizer, loaded, or a directory or name.
        store_dir: as in `prepare`.
        format: as in `prepare`.
        train_on: as in `prepare`.
        turns: as in `prepare`.
        chat_template: of the student; the teacher has its own.
        chat_template_kwargs: as in `prepare`; each of both templates gets those that it reads.
        system_prompt: as in `prepare`, in both templates.
        turn_end: of the student.
        train_on_turn_end: as in `prepare`.
        max_seq_len: most tokens of a sample, for the student and for the teacher; no limit by default.
        on_overflow: as in `prepare`; `split` is refused.
        preprocess: as in `prepare`.
        rename_columns: as in `prepare`.
        on_bad_row: as in `prepare`.
        max_bad_rows: as in `prepare`.
        max_samples: as in `prepare`.
        num_proc: as in `prepare`.
        seed: as in `prepare`.
        progress: as in `prepare`.

    Raises:
        DataError: as `prepare`; rows of token ids, which only one of both can read; no text that both cut alike.
        TemplateError: as `prepare`, of either tokenizer.
        StoreError: as `prepare`.
    """
    options: dict[str, Any] = {
        "format": format, "train_on": train_on, "turns": turns, "chat_template_kwargs": chat_template_kwargs,
        "system_prompt": system_prompt, "train_on_turn_end": train_on_turn_end,
        "max_seq_len": max_seq_len, "on_overflow": on_overflow, "on_bad_pair": "error", "rename_columns": rename_columns,
        "on_bad_row": on_bad_row, "max_bad_rows": max_bad_rows, "max_samples": max_samples, "media": False,
    }  # fmt: skip
    given = Options(**options, chat_template=chat_template, turn_end=turn_end)
    _check_overflow(on_overflow)
    check_name(format)
    check_whole("num_proc", num_proc, at_least=1)
    check_whole("seed", seed)
    function = load_preprocess(preprocess)
    directory = checked_directory(store_dir)
    tokenizers = as_tokenizer(tokenizer), as_tokenizer(teacher)
    ours_read, theirs_read = _arguments(tokenizers, given)
    both = (
        attrs.evolve(given, chat_template_kwargs=ours_read),
        attrs.evolve(given, chat_template=None, turn_end=None, chat_template_kwargs=theirs_read),
    )
    jobs = [
        Job(tokenizer=with_template(own, each.chat_template, each.chat_template_kwargs), options=each, preprocess=function)
        for own, each in zip(tokenizers, both, strict=True)
    ]
    sources = resolve(data_path, max_samples=max_samples)
    for source in sources:
        _check_overflow(source.own.on_overflow, f" of {source.path}")
    read = [_with_own_arguments(sources, tokenizers, given, at) for at in (0, 1)]
    inputs = [
        fingerprint_of_inputs(each, job.tokenizer, job.options, function, seed) for each, job in zip(read, jobs, strict=True)
    ]
    known = None if None in inputs else hashlib.sha256("taught 2:{}:{}".format(*inputs).encode()).hexdigest()
    remove_leftovers(directory)
    if (existing := reusable(TokenStore, directory, known)) is not None:
        return existing
    scratch = partial_of(directory)
    try:
        how: Any = {"num_proc": num_proc, "seed": seed}
        ours = build(jobs[0], read[0], scratch / "student", progress=progress, **how)
        _check_kind(ours)
        try:
            again = resolve(data_path, max_samples=max_samples)
            theirs = build(jobs[1], _with_own_arguments(again, tokenizers, given, 1), scratch / "teacher", **how)
        except (DataError, TemplateError) as error:
            if isinstance(error, TemplateError):
                raise TemplateError(
                    "by the tokenizer of the teacher, whose chat template stands in its directory (`chat_template` is not the "
                    f"teacher's): {error}"
                ) from error
            raise DataError(f"by the tokenizer of the teacher: {error}") from error
        return _joined(ours, theirs, directory, jobs, known)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_overflow(on_overflow: str | None, whose: str = "") -> None:
    if on_overflow == "split":
        raise DataError(
            f"`on_overflow`{whose} is split, which cuts a row at another place for each of two tokenizers; take drop, truncate "
            "or error"
        )


def _with_own_arguments(
    sources: Sequence[Source],
    tokenizers: "tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]",
    options: Options,
    which: int,
) -> list[Source]:
    """Leave of each entry's own arguments those that one tokenizer's template reads."""
    found = []
    for source in sources:
        own = source.own
        if own.chat_template_kwargs:
            theirs = _arguments(tokenizers, attrs.evolve(options, chat_template_kwargs=own.chat_template_kwargs))
            own = attrs.evolve(own, chat_template_kwargs=theirs[which])
        found.append(attrs.evolve(source, own=own))
    return found


def _arguments(
    tokenizers: "tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]", options: Options
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide arguments among both templates.
    One that neither reads is left to the first, which refuses it.
    """
    arguments, templates = options.chat_template_kwargs, (options.chat_template, None)
    ours, theirs = (arguments_read(each, name, arguments) for each, name in zip(tokenizers, templates, strict=True))
    return {name: value for name, value in arguments.items() if name in ours or name not in theirs}, theirs


def _check_kind(store: TokenStore) -> None:
    if "tokenised" in store.settings["format"].split(", "):
        raise DataError(
            f"{store.source(0)}: rows of token ids are of one tokenizer, and a teacher with another one cannot read them; give "
            "text: messages, or prompt and completion"
        )
    if store.kind != SUPERVISED:
        raise DataError(
            f"{store.source(0)}: rows of the kind {store.kind}; a teacher with another tokenizer is for rows to imitate: "
            "messages, or prompt and completion"
        )


def _joined(ours: TokenStore, theirs: TokenStore, directory: Path, jobs: list[Job], inputs: str | None) -> TokenStore:
    """Write the store of both, once it is known what they have in common."""
    totals: Counter[str] = Counter()
    ends: Counter[tuple[int, int]] = Counter()
    with StoreWriter(directory) as writer:
        writer.copy(ours)
        found: list[Aligned] = []
        first = None
        spellings = (Spelling(job.tokenizer) for job in jobs if job.tokenizer is not None)
        for number, aligned in enumerate(_aligned(ours, theirs, *spellings)):
            found.append(aligned)
            ends.update(aligned.ends)
            lengths = aligned.spans[:, 1::2] - aligned.spans[:, ::2]
            totals["spans"] += len(lengths)
            totals["alike"] += int((lengths == 1).all(axis=1).sum())
            totals["tokens"] += int(lengths[:, 0].sum())
            totals["teacher_tokens"] += int(lengths[:, 1].sum())
            if not len(lengths):
                totals["left_out"] += 1
                first = first or ours.source(number)
            if len(found) == _AT_ONCE:
                writer.add(_arrays(found))
                found = []
        if found:
            writer.add(_arrays(found))
        if not totals["spans"]:
            raise DataError(
                f"{ours.source(0)}: of no row do both tokenizers have the same learned text, so that nothing of the teacher "
                "could be compared; look at both with `forge data show`: their chat templates may write answers otherwise"
            )
        learned = int(ours.loss_counts.sum())
        alignment: dict[str, Any] = {"samples": len(ours), "learned": learned, **{name: totals[name] for name in _COUNTED}}
        alignment["first_left_out"] = first
        manifest = writer.finish(
            ours.kind,
            ours._manifest.sources,
            ours.accounting,
            tokenizer=None,
            inputs=inputs,
            settings=ours.settings
            | {"teacher": theirs.settings["tokenizer"], "teacher_ends": _one_to_one(ends), "alignment": alignment},
        )
        writer.commit(manifest, ours.lint.dumps())
    return TokenStore.open(directory)


_COUNTED = ("spans", "alike", "tokens", "teacher_tokens", "left_out")


def _one_to_one(ends: "Counter[tuple[int, int]]") -> list[list[int]]:
    """Choose the most frequent pairs of tokens that end a turn, of which no two share a token."""
    chosen: list[list[int]] = []
    for (own, other), _ in sorted(ends.items(), key=lambda each: (-each[1], each[0])):
        if all(own != taken[0] and other != taken[1] for taken in chosen):
            chosen.append([own, other])
    return chosen


def _arrays(found: list[Aligned]) -> "dict[str, NDArray[Any]]":
    return {
        TEACHER_IDS: np.concatenate([each.ids for each in found]),
        TEACHER_STARTS: np.concatenate([each.starts for each in found]),
        TEACHER_OFFSETS: np.array([len(each.ids) for each in found]),
        SPANS: np.concatenate([each.spans.reshape(-1) for each in found]),
        SPAN_OFFSETS: np.array([each.spans.size for each in found]),
        TEACHER_RUNS: np.array([each.begin for each in found]),
    }


def _aligned(ours: TokenStore, theirs: TokenStore, own: Spelling, other: Spelling) -> Iterator[Aligned]:
    """Yield what the teacher has of each of our samples, row by row."""
    rows = dict(_rows(theirs))
    for place, at in _rows(ours):
        samples = [_sample(ours, index) for index in at]
        yield from align(samples, [_sample(theirs, index) for index in rows.get(place, ())], own, other)


def _rows(store: TokenStore) -> Iterator[tuple[tuple[int, int], range]]:
    """Yield file and number of each row of a store, and its samples, which follow each other."""
    files = np.searchsorted(store._ends, np.arange(len(store)), side="right")
    rows = store._arrays["rows.bin"]
    differ = (np.diff(files) != 0) | (np.diff(rows) != 0)
    begins = np.concatenate(([0], np.flatnonzero(differ) + 1, [len(rows)]))
    for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        yield (int(files[begin]), int(rows[begin])), range(begin, end)


def _sample(store: TokenStore, index: int) -> Sample:
    example = store[index]
    return example.input_ids, example.labels
