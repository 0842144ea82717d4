"""Items of a batch plan → rows as TRL's collators take them, in the plan's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forge._errors import SettingsError
from forge.backends._trl_arguments import Cut, spread

_IGNORE = -100
Row = dict[str, Any]


def rows_of(verb: str, items: Any) -> Callable[[int], list[Row]]:
    """Return what makes TRL's rows of an item: several where turns were tokenized apart."""
    return {"sft": _samples, "dpo": _pairs, "kto": _answers, "reward": _rewards}[verb](items)


def _samples(items: Any) -> Callable[[int], list[Row]]:
    ends = items.store.conversations

    def rows(index: int) -> list[Row]:
        begin, end = (index, index + 1) if ends is None else (int(ends[index]), int(ends[index + 1]))
        found = [items.store[at] for at in range(begin, end)]
        if any(each.weights is not None for each in found):
            raise SettingsError(f"{items.source(index)}: has weights of tokens, which TRL does not read: choose backend=forge.")
        return [{"input_ids": each.input_ids.tolist(), "labels": each.labels.tolist()} for each in found]

    return rows


def _pairs(items: Any) -> Callable[[int], list[Row]]:
    def rows(index: int) -> list[Row]:
        (chosen, rejected) = items.examples(index)
        prompt, answer = _divided(chosen, items.source(index))
        other, worse = _divided(rejected, items.source(index))
        if prompt != other:
            raise SettingsError(
                f"{items.source(index)}: the prompts of its two answers have other tokens, and TRL has one prompt for both: "
                "choose backend=forge."
            )
        return [{"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": worse}]

    return rows


def _answers(items: Any) -> Callable[[int], list[Row]]:
    def rows(index: int) -> list[Row]:
        own, *mismatched = (_divided(example, items.source(index)) for example in items.examples(index))
        found = {"prompt_ids": own[0], "completion_ids": own[1], "label": bool(items.store.desirable[index])}
        if mismatched:
            found["KL_completion_ids"] = mismatched[0][1]
        return [found]

    return rows


def _rewards(items: Any) -> Callable[[int], list[Row]]:
    margins = items.store.margins

    def rows(index: int) -> list[Row]:
        (chosen, _), (rejected, _) = items.examples(index)
        row: Row = {"chosen_ids": chosen.tolist(), "rejected_ids": rejected.tolist()}
        return [row if margins is None else {**row, "margin": float(margins[index])}]

    return rows


def _divided(example: tuple[Any, Any], source: str) -> tuple[list[int], list[int]]:
    """Divide tokens into prompt and answer.

    What follows the last learned token, such as the line break after a turn, changes no loss and is left out, since TRL would
    learn it.

    Raises:
        SettingsError: not all of the answer is learned.

    """
    ids, labels = (np.asarray(part) for part in example)
    learned = np.flatnonzero(labels != _IGNORE)
    begin, end = int(learned[0]), int(learned[-1]) + 1
    if len(learned) < end - begin:
        raise SettingsError(
            f"{source}: only parts of an answer are learned, and TRL learns all that follows the prompt: choose backend=forge, "
            "or train_on=last."
        )
    return ids[:begin].tolist(), ids[begin:end].tolist()


def planned_batches(steps: Sequence[Any], cut: Cut, rank: int, shards: int) -> list[list[int]]:
    """Divide the items of each step into micro-batches, as many a step, and return this rank's."""
    found = []
    for indices in steps:
        begin = 0
        for number, size in enumerate(spread(len(indices), cut.micro_batches * shards)):
            if number % shards == rank:
                found.append([int(index) for index in indices[begin : begin + size]])
            begin += size
    return found


class Rows:
    """Items by index, each as the list of its rows: what torch's DataLoader reads."""

    def __init__(self, rows: Callable[[int], list[Row]], number: int) -> None:
        self._rows, self._number = rows, number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> list[Row]:
        return self._rows(index)
