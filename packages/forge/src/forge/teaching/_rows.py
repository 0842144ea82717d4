"""Rows with log-probabilities that another program computed → parts of a stored teacher."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge._errors import SettingsError
from forge.tasks.items._samples import IGNORED
from forge.tasks.items._stored_teacher import Part

_LEAST_REST = 1e-8
"""Probability that is left at least for all other tokens: sums of rounded numbers say no less."""
_ROUNDING = 1e-3
_LEAST = float(np.finfo(np.float32).min)
"""Log-probabilities that are no higher are stored as -inf."""
_FORMS = (
    "input_ids with target_token_ids and target_logprobs (Axolotl), or prompt_token_ids with prompt_logprobs (vLLM), a list "
    "for each token"
)

Position = list[tuple[int, float]]
"""Tokens with their log-probabilities, the likeliest first."""


class AnsweredRow(NamedTuple):
    """A row with what a teacher said of it."""

    where: str
    input_ids: Sequence[int]
    answers: Mapping[int, tuple[Position, float]]
    """Learned position → the teacher's tokens there, and the log of what is left of its probability."""


def read_parts(files: Sequence[Path], *, top_k: int, width: int | None, vocabulary: int, most: int) -> Iterator[Part]:
    """Read JSON Lines with a teacher's log-probabilities.

    The entry at a token is what the teacher expects in its place. A shorter list is that of the last tokens, as Axolotl takes
    it. Learned is every token with an entry, but those that a `target_mask` of 0 or a label of -100 leaves out.

    Args:
        files: read one after another.
        top_k: tokens that are kept of an entry.
        width: tokens of each position in a part; by default those of its longest entry.
        vocabulary: number of ids that a token may have.
        most: learned positions of a part, about.

    Raises:
        SettingsError: a row has not these columns, or no log-probabilities of this vocabulary, by `file:row`; or no row has
            any.

    """
    rows: list[AnsweredRow] = []
    learned, none = 0, True
    for row in _rows(files, top_k, vocabulary):
        if not row.answers:
            continue
        if rows and learned + len(row.answers) > most:
            yield part_of_rows(rows, width)
            rows, learned = [], 0
        rows.append(row)
        learned += len(row.answers)
        none = False
    if none:
        raise SettingsError(
            f"data_path {', '.join(map(str, files))}: no row has a learned token with log-probabilities. Wanted are {_FORMS}."
        )
    yield part_of_rows(rows, width)


def part_of_rows(rows: Sequence[AnsweredRow], width: int | None) -> Part:
    """Make a part of rows, `width` tokens a position; by default the longest answer's."""
    answers = [answer for row in rows for answer in row.answers.values()]
    K = width or max(len(known) for known, _ in answers)
    ids_MK, logps_MK = np.zeros((len(answers), K), np.int32), np.full((len(answers), K), -np.inf, np.float32)
    for at, (known, _) in enumerate(answers):
        ids_MK[at, : len(known)], logps_MK[at, : len(known)] = zip(*known, strict=True)
    return Part(
        rows=[row.where for row in rows],
        input_ids=[np.asarray(row.input_ids, np.int32) for row in rows],
        positions=[np.asarray(list(row.answers), np.int32) for row in rows],
        ids=ids_MK,
        logps=logps_MK,
        rest=np.asarray([rest for _, rest in answers], np.float32),
    )


def _rows(files: Sequence[Path], top_k: int, vocabulary: int) -> Iterator[AnsweredRow]:
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _read(line, f"{file}:{number}", top_k, vocabulary)


def _read(line: bytes, where: str, top_k: int, vocabulary: int) -> AnsweredRow:
    """Read a row. Raises SettingsError for other columns, and for no log-probabilities."""
    try:
        row = json.loads(line)
        ids, found = _columns(row)
        mask, labels = _at_the_end(row.get("target_mask"), len(ids)), _at_the_end(row.get("labels"), len(ids))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SettingsError(f"{where}: holds no log-probabilities as they are read: {_FORMS}. {error}") from error
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise SettingsError(f"{where}: its tokens are from {min(ids)} to {max(ids)}, and the vocabulary has {vocabulary}.")
    answers = {}
    for at, given in enumerate(found):
        left_out = (mask is not None and not _is_set(mask[at])) or (labels is not None and labels[at] in (None, IGNORED))
        if at and given and not left_out:
            answers[at] = checked_answer(given, top_k, vocabulary, f"{where}: token {at}")
    return AnsweredRow(where, ids, answers)


def _columns(row: Mapping[str, Any]) -> tuple[list[int], list[Position | None]]:
    """Return the token ids of a row, and at each the teacher's tokens, if any."""
    if "prompt_logprobs" in row:
        ids = row["prompt_token_ids"]
        found: list[Any] = [None if each is None else _of_vllm(each) for each in row["prompt_logprobs"]]
    else:
        ids = row["input_ids"]
        logps = row["target_logprobs"] if "target_logprobs" in row else row["logprobs"]
        found = [
            None if one is None or many is None else [(_id(token), float(logp)) for token, logp in zip(one, many, strict=True)]
            for one, many in zip(row["target_token_ids"], logps, strict=True)
        ]
    aligned = _at_the_end(found, len(ids))
    assert aligned is not None
    return [_id(token) for token in ids], aligned


def _of_vllm(entry: Mapping[str, Any]) -> Position:
    return [(int(token), float(each["logprob"] if isinstance(each, Mapping) else each)) for token, each in entry.items()]


def _id(token: Any) -> int:
    """Return a token id. Raises TypeError for another number, which int() would cut."""
    return operator.index(token)


def _at_the_end(values: Sequence[Any] | None, number: int) -> list[Any] | None:
    """Return the values of so many tokens, of which a shorter list has the last.

    Raises:
        ValueError: the list is longer.

    """
    if values is None:
        return None
    if len(values) > number:
        raise ValueError(f"There are {len(values)} entries for {number} tokens.")
    return [*[None] * (number - len(values)), *values]


def _is_set(mask: Any) -> bool:
    """Return whether a mask leaves a position in; Axolotl's has K numbers for each."""
    return bool(any(mask) if isinstance(mask, Sequence) else mask)


def checked_answer(given: Position, top_k: int, vocabulary: int, where: str) -> tuple[Position, float]:
    """Return the likeliest tokens, and the log of what is left.

    Raises:
        SettingsError: it is no distribution.

    """
    if any(not logp <= _ROUNDING for _, logp in given):
        raise SettingsError(f"{where}: has a log-probability above 0, or NaN.")
    known = sorted(((token, logp) for token, logp in given if logp > _LEAST), key=lambda each: -each[1])
    if len({token for token, _ in known}) < len(known) or any(not 0 <= token < vocabulary for token, _ in known):
        raise SettingsError(f"{where}: names a token twice, or one that the vocabulary of {vocabulary} has not.")
    total = math.fsum(math.exp(logp) for _, logp in known)
    if not 0 < total <= 1 + _ROUNDING:
        raise SettingsError(f"{where}: its probabilities add up to {total:g}, which must be above 0 and at most 1.")
    kept = known[:top_k]
    left = 1 - math.fsum(math.exp(logp) for _, logp in kept)
    return kept, -math.inf if len(kept) == vocabulary else math.log(max(left, _LEAST_REST))
