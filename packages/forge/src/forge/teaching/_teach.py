"""A teacher and rows → its likeliest tokens at each learned token, on disk."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

import forge_data
import forge_dist
from forge._counted import counted
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.saving._inputs import WEIGHTS, stamps_of
from forge.talking._forgetting import as_columns
from forge.talking._model import find_model
from forge.tasks._lint_check import check_kind
from forge.tasks.items._stored_teacher import StoredTeacher, vocabulary_digest
from forge.teaching._asked import Asking
from forge.teaching._output import TeacherOutput
from forge.teaching._processes import ask_by_processes, processes
from forge.teaching._rows import read_parts
from forge.teaching._server import ServedTeacher, is_server

_PART_BYTES = 2**28
"""Bytes of a part's log-probabilities, about: what a kill loses is less than a part."""


_LITTLE = 0.5
"""Share of the teacher's probability below which what is stored says little of what the teacher expects."""


@attrs.frozen(kw_only=True)
class Taught:
    """What was stored of a teacher."""

    path: Path
    samples: int
    tokens: int
    """Learned tokens."""
    top_k: int
    """Tokens that are stored at each, at most."""
    num_bytes: int
    """Size of the directory, about."""
    covered: float | None = None
    """Mean share of the teacher's probability that they hold; None in a dry run."""
    dry_run: bool

    def __str__(self) -> str:
        verb = "would write" if self.dry_run else "wrote"
        size = f"{self.num_bytes / 2**20:,.1f} MiB" if self.num_bytes >= 2**20 else f"{self.num_bytes / 2**10:,.1f} KiB"
        held = "" if self.covered is None else f", which hold {self.covered:.1%} of the teacher's probability"
        if self.covered is not None and self.covered < _LITTLE:
            held += ". WARNING: the rest is learned as one class; set a larger top_k"
        return (
            f"{verb} {counted(self.tokens, 'learned tokens')} of {counted(self.samples, 'samples')}, {size}: "
            f"{counted(self.top_k, 'tokens')} at each{held}\n{self.path}"
        )


@attrs.frozen(kw_only=True)
class _Request:
    """What is to be stored of each position, and where."""

    folder: Path
    tokenizer: Any
    top_k: int
    temperature: float
    dry_run: bool

    @property
    def vocabulary(self) -> int:
        """Number of ids that the tokenizer may give."""
        return 1 + max(self.tokenizer.get_vocab().values())

    @property
    def about(self) -> dict[str, Any]:
        """What teacher.json says of it."""
        return {"tokenizer": vocabulary_digest(self.tokenizer), "top_k": self.top_k, "temperature": self.temperature}

    def taught(self, *, samples: int, tokens: int, text: int, width: int) -> Taught:
        """Return the counts and the size, from the tokens in all and K at each learned one."""
        size = tokens * (8 * width + 8) + 4 * text + 20 * samples
        return Taught(path=self.folder, samples=samples, tokens=tokens, top_k=width, num_bytes=size, dry_run=self.dry_run)


def teach(
    *,
    data_path: Sequence[str],
    output: str | Path,
    teacher_path: str | None = None,
    model_path: str | None = None,
    from_rows: bool = False,
    top_k: int = 64,
    temperature: float = 1.0,
    data_format: str = "auto",
    train_on: str = "assistant",
    turns: str = "auto",
    turn_end: str | None = None,
    train_on_turn_end: str = "turn",
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | Sequence[str] | None = None,
    system_prompt: str | None = None,
    max_seq_len: int | None = None,
    on_overflow: str = "drop",
    preprocess: str | None = None,
    rename_columns: Mapping[str, str] | Sequence[str] | None = None,
    max_samples: int | None = None,
    on_bad_row: str = "error",
    max_bad_rows: float = 0.01,
    nproc_per_node: int | str | None = None,
    server_timeout: float = 600.0,
    dry_run: bool = False,
) -> Taught:
    """Store a teacher's likeliest tokens at each learned token of some rows, once for many runs.

    `forge distill --teacher-logprobs OUTPUT` learns from them without the teacher. A command that was killed goes on where it
    was when it is started again.

    Args:
        data_path: Files, globs or directories of rows, or one, as for forge distill: those of the runs, held-out rows too.
        output: The directory that is written: 8 bytes for each of the top_k tokens of a learned token.
        teacher_path: Directory or Hub name of the teacher, or the address of a server of vLLM or SGLang that has it
            (http://localhost:8000), with model_path.
        model_path: The model that will learn, whose chat template writes the rows; by default the teacher. Both need the same
            tokenizer.
        from_rows: The rows themselves hold what another program computed: input_ids with target_token_ids and target_logprobs
            (Axolotl), or prompt_token_ids with prompt_logprobs (vLLM). Then model_path is needed, and no teacher_path.
        top_k: How many tokens.
        temperature: Divisor of the teacher's logits, that of the runs.
        data_format: As for forge distill, like all that follow to max_bad_rows: format of the rows.
        train_on: What is learned.
        turns: In which form turns are learned.
        turn_end: Token that ends a learned turn.
        train_on_turn_end: Which ends of turns are learned.
        chat_template: Chat template in place of the tokenizer's.
        chat_template_kwargs: Arguments of the chat template, such as enable_thinking=false.
        system_prompt: System message of conversations that have none.
        max_seq_len: Longest sample in tokens.
        on_overflow: What becomes of longer ones.
        preprocess: Your own function that gets each row first, as package.module:function.
        rename_columns: Columns that a format reads under another name, such as question=prompt.
        max_samples: Rows that are read of each entry of data_path.
        on_bad_row: What becomes of a row that is refused.
        max_bad_rows: Largest share of rows that may be left out.
        nproc_per_node: Processes that share the rows, each with the teacher on a device of its own: a number, or auto for one
            per accelerator. What they store is what one process does.
        server_timeout: Seconds that a server may take for an answer.
        dry_run: Say how much would be written, and load no model.

    Returns:
        What was stored, as text its size and its path.

    Raises:
        SettingsError: a value is out of range, the two tokenizers differ, or output is of something else.
        RunDirectoryError: another command writes to output now.
        forge_data.DataError: there are no such rows, or they cannot be read.
        forge_dist.ModelError: the teacher cannot be loaded.
        forge_algos.RolloutError: a server does not answer, or says less than top_k tokens.
        RunWriteError: a file cannot be written.

    """
    if top_k < 1:
        raise SettingsError(f"top_k must be at least 1, not {top_k}.")
    if not 1e-6 <= temperature < float("inf"):
        raise SettingsError(f"temperature must be at least 1e-6 and finite, not {temperature}.")
    folder = Path(os.path.abspath(Path(output).expanduser()))
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"output {folder}: is a file. Give a directory.")
    reading: dict[str, Any] = {
        "train_on": train_on, "turns": turns, "turn_end": turn_end, "train_on_turn_end": train_on_turn_end,
        "chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs, "system_prompt": system_prompt,
        "max_seq_len": max_seq_len, "on_overflow": on_overflow, "preprocess": preprocess,
        "rename_columns": as_columns(rename_columns), "max_samples": max_samples, "on_bad_row": on_bad_row,
        "max_bad_rows": max_bad_rows,
    }  # fmt: skip
    files = [data_path] if isinstance(data_path, str) else list(data_path)
    how: dict[str, Any] = {"folder": folder, "top_k": top_k, "temperature": temperature, "dry_run": dry_run}
    if teacher_path is None:
        if not from_rows:
            raise SettingsError("teacher_path is wanted, a teacher that is asked, or from_rows, what rows hold of one.")
        if nproc_per_node is not None:
            raise SettingsError("nproc_per_node has no effect with from_rows, which asks no teacher.")
        if model_path is None:
            raise SettingsError("model_path is wanted with from_rows: the model whose tokens the rows are of.")
        _refuse_unread({"data_format": data_format, **reading})
        return _convert(_row_files(files), _Request(tokenizer=forge_data.load_tokenizer(find_model(model_path)), **how))
    if from_rows:
        raise SettingsError(
            "from_rows reads what a teacher said from the rows, and teacher_path asks one: give one of the two."
        )
    served = is_server(teacher_path)
    if served:
        _check_served(model_path, temperature, nproc_per_node, server_timeout)
    teacher = teacher_path if served else find_model(teacher_path)
    student = teacher if model_path is None else find_model(model_path)
    request = _Request(tokenizer=forge_data.load_tokenizer(student), **how)
    if not served and forge_data.load_tokenizer(teacher).get_vocab() != request.tokenizer.get_vocab():
        raise SettingsError(
            f"teacher_path {teacher}: its tokenizer gives other ids to tokens than that of model_path, so that its predictions "
            "are about other words. Take a teacher of the same family, or `forge distill --loss gold --teacher-path`."
        )
    where = processes(nproc_per_node)
    try:
        data_sets = attrs.fields_dict(forge_data.DataSettings)["data_path"].metadata["words"](files)
        data: Any = forge_data.DataSettings(data_path=data_sets, data_format=data_format, **reading)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{error}.") from error
    report = Reporter(lambda _: None)
    with TemporaryDirectory() as scratch:
        read = {name: getattr(data, name) for name in reading}
        tokenizing = report.progress("tokenizing")
        store = forge_data.prepare(data_sets, student, scratch, format=data.data_format, **read, progress=tokenizing)
        check_kind("teach", store, "supervised", "rows as forge distill: messages, prompt and completion, documents, or tokens")
        return _ask(store, teacher, request, report, where, server_timeout if served else None)


def _check_served(model_path: str | None, temperature: float, nproc_per_node: int | str | None, timeout: float) -> None:
    """Refuse what a teacher behind a server has not."""
    if model_path is None:
        raise SettingsError("model_path is wanted with the address of a server: the model whose chat template writes the rows.")
    if temperature != 1:
        raise SettingsError(f"temperature={temperature:g}: a server says the log-probabilities of temperature 1. Leave it out.")
    if nproc_per_node is not None:
        raise SettingsError("nproc_per_node has no effect with a server, which has the teacher itself.")
    if not 0 < timeout < float("inf"):
        raise SettingsError(f"server_timeout must be above 0 and finite, not {timeout}.")


def _ask(
    store: Any, teacher: str, request: _Request, report: Reporter, where: forge_dist.Topology, timeout: float | None
) -> Taught:
    """Write the parts that are not there yet; with a time limit the teacher is a server's."""
    counts, width = store.loss_counts, min(request.top_k, request.vocabulary)
    samples = [index for index in range(len(store)) if counts[index]]
    if not samples:
        raise SettingsError("data_path: no row has a token that is learned. Give other rows, or another train_on.")
    found = request.taught(samples=len(samples), tokens=int(counts.sum()), text=int(store.lengths[samples].sum()), width=width)
    if request.dry_run:
        return found
    parts = list(_divide(samples, counts, most=max(1, _PART_BYTES // (8 * width))))
    sizes = [len(part) for part in parts]
    if timeout is not None:
        server = ServedTeacher(teacher, request.tokenizer, timeout=timeout)
        server.check(store, samples)
        served: list[Any] = [store.fingerprint, server.model, request.top_k, sizes]
        with TeacherOutput(request.folder) as output:
            todo = output.begin(served, {"teacher": server.model, "parts": len(parts), **request.about})
            asked = {number: parts[number] for number in todo}
            server.ask(asked, store, output.write, report, top_k=request.top_k, vocabulary=request.vocabulary)
        return attrs.evolve(found, covered=StoredTeacher(request.folder).covered())
    weights = stamps_of(Path(teacher), WEIGHTS) if Path(teacher).is_dir() else {}
    asking = Asking(
        teacher=teacher,
        store=str(store.path),
        top_k=request.top_k,
        below=request.vocabulary,
        temperature=request.temperature,
    )
    about = [store.fingerprint, teacher, weights, request.top_k, request.temperature, asking.dtype, sizes]
    with TeacherOutput(request.folder) as output:
        todo = output.begin(about, {"teacher": teacher, "parts": len(parts), **request.about})
        if todo and where.role == "launcher":
            ask_by_processes(asking, {number: parts[number] for number in todo}, output, where)
        elif todo:
            asking({number: parts[number] for number in todo}, store, output.write, report)
    return attrs.evolve(found, covered=StoredTeacher(request.folder).covered())


def _divide(samples: Sequence[int], counts: Any, *, most: int) -> Iterator[list[int]]:
    """Divide samples into parts of about so many learned tokens."""
    part: list[int] = []
    learned = 0
    for index in samples:
        if part and learned + counts[index] > most:
            yield part
            part, learned = [], 0
        part.append(index)
        learned += int(counts[index])
    yield part


def _convert(files: Sequence[Path], request: _Request) -> Taught:
    """Write what rows of another program hold.

    They are read twice: nothing is written before all are known to be right.
    """
    how: dict[str, Any] = {"top_k": request.top_k, "vocabulary": request.vocabulary}
    how["most"] = max(1, _PART_BYTES // (8 * min(request.top_k, request.vocabulary)))
    parts = samples = tokens = text = width = 0
    for part in read_parts(files, width=None, **how):
        parts, samples, tokens = parts + 1, samples + len(part.rows), tokens + len(part.rest)
        text, width = text + sum(map(len, part.input_ids)), max(width, part.ids.shape[1])
    found = request.taught(samples=samples, tokens=tokens, text=text, width=width)
    if request.dry_run:
        return found
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    about = [digests, request.top_k, request.temperature, vocabulary_digest(request.tokenizer), parts]
    with TeacherOutput(request.folder) as output:
        todo = set(output.begin(about, {"teacher": "rows", "parts": parts, **request.about}))
        for number, part in enumerate(read_parts(files, width=width, **how)):
            if number in todo:
                output.write(number, part)
    return attrs.evolve(found, covered=StoredTeacher(request.folder).covered())


def _refuse_unread(reading: Mapping[str, Any]) -> None:
    """Raise SettingsError for a setting of how rows are read, of which from_rows has none."""
    defaults = inspect.signature(teach).parameters
    if given := [name for name, value in reading.items() if value != defaults[name].default]:
        raise SettingsError(
            f"{given[0]}={reading[given[0]]} has no effect with from_rows, which takes every row as it is, in tokens: leave it "
            "out."
        )


def _row_files(files: Sequence[str]) -> list[Path]:
    """Return JSON Lines files by name. Raises SettingsError for what is none."""
    paths = [Path(each).expanduser() for each in files]
    for path in paths:
        if not path.exists():
            raise SettingsError(f"data_path {path}: there is no such file.")
        if not path.is_file() or path.suffix not in (".jsonl", ".ndjson"):
            raise SettingsError(f"data_path {path}: with from_rows files of JSON Lines are read (.jsonl). Give such a file.")
    return paths
