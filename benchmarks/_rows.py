"""Packed rows of chats that every side trains on, one row an optimizer step, written once and read by each side's process.

File: an .npz of `input_ids`, `labels` (int32, all chats flat), `lengths` int64[B], and `row_samples`, `row_sizes` (the chats
of each row).
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from _chats import Chats


class Sample(NamedTuple):
    """Tokenized chat: `input_ids` int32[S], `labels` int32[S], -100 where no loss is counted."""

    input_ids: np.ndarray
    labels: np.ndarray


class Rows(NamedTuple):
    """Packed rows: `samples[i]` are the chats of row i, in order."""

    samples: list[list[Sample]]

    def lengths(self, row: int) -> list[int]:
        """Return the tokens of each chat in a row."""
        return [len(sample.input_ids) for sample in self.samples[row]]

    def tokens(self, row: int) -> int:
        """Return the tokens of a row, which has no padding."""
        return sum(self.lengths(row))

    def labelled(self, row: int) -> int:
        """Count the positions of a row whose next token is learned; the first label of a chat never counts."""
        return sum(int((sample.labels[1:] != -100).sum()) for sample in self.samples[row])


def write_rows(path: Path, chats: Chats, capacity: int, steps: int) -> Rows:
    """Pack all the chats into rows of at most `capacity` tokens with forge_packing and keep `steps` of the full ones.

    The rows are drawn, not taken in order: best-fit decreasing puts the longest chats into the first rows and the shortest
    into the last.
    """
    from forge_packing import pack_rows

    packed = [row for row in pack_rows(chats.lengths, capacity) if chats.lengths[row].sum() >= 0.95 * capacity]
    if len(packed) < steps:
        raise SystemExit(
            f"{len(chats.lengths)} chats fill {len(packed)} rows of {capacity} tokens, too few for {steps} steps: "
            "lower --steps or --tokens"
        )
    rows = [packed[i] for i in np.random.default_rng(0).permutation(len(packed))[:steps]]
    np.savez(
        path,
        input_ids=chats.input_ids,
        labels=chats.labels,
        lengths=chats.lengths,
        row_samples=np.concatenate(rows),
        row_sizes=np.array([len(row) for row in rows]),
    )
    return read_rows(path)


def write_batches(path: Path, chats: Chats, size: int, steps: int) -> Rows:
    """Draw `size` chats for each of `steps` steps, whatever their lengths."""
    if len(chats.lengths) < size * steps:
        raise SystemExit(f"{len(chats.lengths)} chats are too few for {steps} steps of {size}: lower --steps or --samples")
    drawn = np.random.default_rng(0).permutation(len(chats.lengths))[: size * steps]
    np.savez(
        path,
        input_ids=chats.input_ids,
        labels=chats.labels,
        lengths=chats.lengths,
        row_samples=drawn,
        row_sizes=np.full(steps, size),
    )
    return read_rows(path)


def write_samples(path: Path, ids: list[np.ndarray], labels: list[np.ndarray], *, each: int) -> Rows:
    """Write samples as they come, `each` of them a row."""
    np.savez(
        path,
        input_ids=np.concatenate(ids),
        labels=np.concatenate(labels),
        lengths=np.array([len(sample) for sample in ids]),
        row_samples=np.arange(len(ids)),
        row_sizes=np.full(len(ids) // each, each),
    )
    return read_rows(path)


def read_rows(path: Path) -> Rows:
    """Read the rows that `write_rows` wrote."""
    with np.load(path, allow_pickle=False) as file:
        ends = np.cumsum(file["lengths"])
        starts = ends - file["lengths"]
        input_ids, labels = file["input_ids"], file["labels"]
        rows, at = [], 0
        for size in file["row_sizes"]:
            chosen = file["row_samples"][at : at + size]
            rows.append([Sample(input_ids[starts[i] : ends[i]], labels[starts[i] : ends[i]]) for i in chosen])
            at += int(size)
    return Rows(rows)
