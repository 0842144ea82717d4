"""Stores of parts of the rows → the store that one process makes of all rows."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from forge_data._accounting import Accounting
from forge_data._bad_rows import BadRows
from forge_data._errors import StoreError
from forge_data._settings import MAX_BAD_ROWS
from forge_data._values import parsed_json
from forge_data.findings._report import Findings
from forge_data.findings._rules import SET_RULES
from forge_data.linting._lint import store_findings
from forge_data.preparing._prepare import as_trained, checked_directory
from forge_data.store._manifest import MARGINS, PROMPTS, TOKENIZER, Manifest, SourceFile
from forge_data.store._open import open_store
from forge_data.store._partial import remove_leftovers
from forge_data.store._prompt_store import PromptStore
from forge_data.store._token_store import TokenStore
from forge_data.store._writer import StoreWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Part = TokenStore | PromptStore
_OF_LOADING = ("is_local", "local_files_only")
"""Entries of a tokenizer's configuration that tell how it was loaded."""


def merge(store_dir: str | os.PathLike[str], parts: Sequence[str | os.PathLike[str]]) -> TokenStore | PromptStore:
    """Join the parts that `shard="K/N"` made into the store of all rows.

    Parts are made by `prepare` or `prepare_prompts`. It is the very store that they make without `shard`, byte for byte, and is
    opened again by them; duplicates and outliers of samples are found among all rows. Every byte of the parts is verified.

    Args:
        store_dir: directory of the store: missing, empty, or a store, which is replaced once the new one is complete.
        parts: directories of all N parts.

    Raises:
        StoreError: a part is missing, damaged, given twice or made from something else, or `store_dir` cannot be written.
        DataError: all parts together have more bad rows than `max_bad_rows` allows.
    """
    directory = checked_directory(store_dir)
    opened = _in_order([open_store(part) for part in parts])
    for part in opened:
        if part.path.resolve() == directory.resolve():
            raise StoreError(f"{directory} is one of the parts; give another directory for the store of all")
        part.verify()
    full, accounting = [part for part in opened if len(part)], _added([part.accounting for part in opened])
    _check_bad_rows(opened, accounting.read)
    if not full:
        holds = "prompt" if opened[0].kind == PROMPTS else "sample"
        raise StoreError(f"{opened[0].path} and all other parts hold no {holds}: {accounting}")
    _check_alike(full)
    remove_leftovers(directory)
    with StoreWriter(directory) as writer:
        for part in opened:
            writer.copy(part)
        files = _files([_sources(part) for part in opened])
        formats = ", ".join(dict.fromkeys(file.format for file in files if file.format))
        tokenizer = _tokenizer(full[0])
        trained = as_trained(tokenizer, accounting)
        manifest = writer.finish(
            full[0].kind,
            files,
            accounting,
            # Otherwise that of the parts, copied as it is.
            tokenizer=None if trained is tokenizer else trained,
            inputs=full[0].inputs,
            settings=full[0].settings | ({"format": formats} if formats else {}),
        )
        writer.commit(manifest, _lint(opened, writer, manifest))
    return open_store(directory)


def _lint(parts: list[_Part], writer: StoreWriter, manifest: Manifest) -> str | None:
    """Report the findings on all parts and among all rows; None of prompts."""
    samples = [part for part in parts if isinstance(part, TokenStore)]
    if not samples:
        return None
    findings = Findings()
    for part in samples:
        findings.resume(part.lint, without=SET_RULES)
    findings.add(store_findings(TokenStore(writer.partial, manifest)))
    return findings.report(manifest.accounting.read).dumps()


def _in_order(parts: list[_Part]) -> list[_Part]:
    """Sort parts by number.

    Raises:
        StoreError: one is no part, or of another whole; one is missing, or there twice.
    """
    if not parts:
        raise StoreError("no parts are given; give the directories that prepare made with `shard`")
    first, by_number = parts[0], dict[int, _Part]()
    for part in parts:
        if part.shard is None or first.shard is None:
            raise StoreError(f"{part.path} is no part but a store of all its rows; parts are made by prepare with `shard`")
        if part.shard.of != first.shard.of:
            raise StoreError(f"{part.path} is one of {part.shard.of} parts, and {first.path} one of {first.shard.of}")
        if part.inputs != first.inputs:
            raise StoreError(
                f"{part.path} was made from other rows, or with another tokenizer, other settings or libraries than "
                f"{first.path}; make all parts with the same command"
            )
        if (other := by_number.setdefault(part.shard.index, part)) is not part:
            raise StoreError(f"{other.path} and {part.path} are both part {part.shard.index} of {part.shard.of}")
    assert first.shard is not None
    if missing := [str(number) for number in range(1, first.shard.of + 1) if number not in by_number]:
        raise StoreError(f"of {first.shard.of} parts {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing")
    return [by_number[number] for number in sorted(by_number)]


def _check_alike(parts: list[_Part]) -> None:
    """Refuse rows of one kind beside others, which one process refuses by row.

    Raises:
        StoreError: naming both parts.
    """
    formats = [next((file.format for file in files if file.format), None) for files in zip(*map(_sources, parts), strict=True)]
    for part in parts:
        other = [
            (file.format, first)
            for file, first in zip(_sources(part), formats, strict=True)
            if file.format not in (None, first)
        ]
        for what, of_this, of_first in (
            *(("format", *pair) for pair in other[:1]),
            ("kind", part.kind, parts[0].kind),
            ("margins", MARGINS in part.sha256, MARGINS in parts[0].sha256),
        ):
            if of_this != of_first:
                raise StoreError(
                    f"{part.path} ({part.shard}) and {parts[0].path} ({parts[0].shard}) hold rows of another {what}: "
                    f"{of_this} and {of_first}; put such rows into files of their own"
                )


def _tokenizer(part: _Part) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a part so that it is saved as it was, not as one loaded here."""
    tokenizer = part.tokenizer()
    saved = parsed_json((part.path / TOKENIZER / "tokenizer_config.json").read_text("utf-8"))
    for name in _OF_LOADING:
        tokenizer.init_kwargs.pop(name, None)
        tokenizer.init_kwargs |= {name: saved[name]} if name in saved else {}
    return tokenizer


def _check_bad_rows(parts: list[_Part], read: int) -> None:
    """Refuse more bad rows than all parts together may leave out, as one process does."""
    bad = BadRows()
    for part in parts:
        for row in part.dropped():
            if "error" in row:
                bad.add(row["reason"], row["error"])
    bad.check(read, parts[0].settings.get("max_bad_rows", MAX_BAD_ROWS))


def _added(accountings: list[Accounting]) -> Accounting:
    """Add every count up, by reason where there are reasons."""
    total: dict[str, Any] = {}
    for accounting in accountings:
        for name, value in accounting.as_dict().items():
            count = Counter(value) if isinstance(value, dict) else value
            total[name] = total[name] + count if name in total else count
    return Accounting(**total)


def _sources(part: _Part) -> list[SourceFile]:
    return part._manifest.sources


def _files(parts: list[list[SourceFile]]) -> list[SourceFile]:
    return [_file(files) for files in zip(*parts, strict=True)]


def _file(parts: Sequence[SourceFile]) -> SourceFile:
    """Add up what became of the parts of a file."""
    counts = {name: sum(getattr(part, name) or 0 for part in parts) for name in ("samples", "read", "kept")}
    # Parts of several machines may have their images in unlike places.
    places = {part.directory for part in parts if part.directory is not None}
    return attrs.evolve(
        parts[0],
        **counts,
        format=next((part.format for part in parts if part.format), None),
        directory=places.pop() if len(places) == 1 else None,
    )
