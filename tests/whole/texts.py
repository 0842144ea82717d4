"""Rows of plain text with images, and what a model's processor makes of them as its documentation asks it."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoProcessor
from transformers.image_utils import load_image

from . import pictures, reference, test_images_of_answers as rated
from .conftest import write_rows

if TYPE_CHECKING:
    from pathlib import Path

    import forge_data

OTHER = "\n no plum"
"""The rejected answer of a pair, and an unwanted one."""


def row(folder: Path, number: int) -> dict[str, Any]:
    """One image before the prompt, two at marks in it, or none, in turn."""
    (folder / "images").mkdir(exist_ok=True)
    count = (1, 2, 0)[number % 3]
    files = [f"images/{number}_{each}.png" for each in range(count)]
    for each, file in enumerate(files):
        pictures.picture(10 * number + each).save(folder / file)
    prompt = f"caption the picture {number} in a few words"
    prompt = f"<image>before {prompt} <image>" if count == 2 else prompt
    return {"prompt": prompt, "completion": f"\n {number} plums and a cherry", **({"images": files} if files else {})}


def rows(folder: Path, number: int) -> Path:
    """Rows in a file, beside their images."""
    return write_rows(folder / "rows.jsonl", [row(folder, each) for each in range(number)])


def pair(row: dict[str, Any]) -> dict[str, Any]:
    """A preference of a row's completion."""
    return {"prompt": row["prompt"], "chosen": row["completion"], "rejected": OTHER, "images": row.get("images", [])}


def rated_row(row: dict[str, Any], number: int) -> dict[str, Any]:
    """A rated answer: a third of them is unwanted, and another one."""
    return row | {"label": bool(number % 3)} | ({} if number % 3 else {"completion": OTHER})


def asked(processor: Any, row: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """What the processor makes of a row, as its documentation asks it, with `labels`."""
    images = [load_image(str(folder / file)) for file in row.get("images", [])]
    eos, count = processor.tokenizer.eos_token, row["prompt"].count("<image>")
    prompt = row["prompt"] if count else "<image>" * len(images) + row["prompt"]
    if not images:
        ids = processor.tokenizer(prompt + row["completion"] + eos, return_tensors="pt")["input_ids"]
        learned = len(processor.tokenizer(row["completion"] + eos)["input_ids"])
        marks = {"token_type_ids": torch.ones_like(ids)} if takes_suffix(processor) else {}
        return {"input_ids": ids, "labels": _labels(ids, learned)} | marks
    if takes_suffix(processor):
        arrays = processor(text=[prompt], images=[images], suffix=[row["completion"]], return_tensors="np")
        return {name: torch.as_tensor(array) for name, array in arrays.items()}
    made = dict(processor(text=[prompt + row["completion"] + eos], images=[images], return_tensors="pt"))
    return made | {"labels": _labels(made["input_ids"], len(processor.tokenizer(row["completion"] + eos)["input_ids"]))}


def takes_suffix(processor: Any) -> bool:
    """Whether it is given a completion by itself."""
    return type(processor).__name__ == "PaliGemmaProcessor"


def _labels(ids: torch.Tensor, learned: int) -> torch.Tensor:
    return torch.where(torch.arange(ids.shape[1]) >= ids.shape[1] - learned, ids, -100)


def read(data: Path) -> list[dict[str, Any]]:
    """Rows of a file."""
    return [json.loads(line) for line in data.read_text().splitlines()]


def sample(processor: Any, row: dict[str, Any], completion: str, folder: Path) -> reference.Sample:
    """A prompt with a completion."""
    made = asked(processor, row | {"completion": completion}, folder)
    return reference.Sample(made.pop("input_ids")[0].tolist(), made.pop("labels")[0].tolist(), made)


@cache
def _processor(model: Path) -> Any:
    return AutoProcessor.from_pretrained(model)


def _row_of(store: forge_data.TokenStore, at: int, given: list[dict[str, Any]]) -> dict[str, Any]:
    return given[int(store.source(at).rpartition(":")[2]) - 1]


def _same(sample: reference.Sample, store: forge_data.TokenStore, at: int) -> None:
    assert sample.input_ids == store[at].input_ids.tolist()
    assert sample.labels == store[at].labels.tolist()


def inputs_of(model: Path, data: Path) -> Any:
    """What the processor makes of each row, `three_steps.Inputs`; ids and labels must be those of the store."""
    given = read(data)

    def inputs(store: forge_data.TokenStore, at: int) -> dict[str, torch.Tensor]:
        row = _row_of(store, at, given)
        made = sample(_processor(model), row, row["completion"], data.parent)
        _same(made, store, at)
        return dict(made.inputs)

    return inputs


def pairs_of(store: forge_data.TokenStore, data: Path, model: Path) -> list[list[reference.Sample]]:
    """Both samples of each pair of a store; their ids and labels must be the store's."""
    given, found = read(data), []
    for both in store.pairs.tolist():
        row = _row_of(store, both[0], given)
        # Without a prompt it is what both begin with: one line break more.
        shared = row.get("prompt", row["chosen"].partition("\n")[0] + "\n")
        before = 0 if "prompt" in row else len(shared)
        sides = [row[side][before:] for side in ("chosen", "rejected")]
        found.append([sample(_processor(model), row | {"prompt": shared}, each, data.parent) for each in sides])
        for made, at in zip(found[-1], both, strict=True):
            _same(made, store, at)
    return found


class Rated(rated.Answers):
    """Answers and their mismatches, as the processor reads them."""

    def __init__(self, store: forge_data.TokenStore, data: Path, model: Path) -> None:
        processor, given = _processor(model), read(data)
        rows = [_row_of(store, at, given) for at in range(len(store))]
        self.wanted = [row["label"] for row in rows]
        following = rows[1:] + rows[:1]
        self.own = [sample(processor, row, row["completion"], data.parent) for row in rows]
        both = zip(rows, following, strict=True)
        self.others = [sample(processor, row, other["completion"], data.parent) for row, other in both]
        for at, made in enumerate(self.own):
            _same(made, store, at)
