"""Model and rows with images → how its rows are made: several documents with images, or one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
from forge._errors import SettingsError
from forge.tasks.items._items import VIRTUAL
from forge.tasks.items._samples import Conversations, Samples

if TYPE_CHECKING:
    from forge.tasks._task import Run

_TRIED = 64
"""Samples with images that are looked at for two short ones."""


def has_images(*stores: Any) -> bool:
    """Return whether samples of token stores have images."""
    return any(getattr(store, "has_images", False) for store in stores if store is not None)


def check_images(s: Any, *stores: Any) -> None:
    """Refuse settings with which rows with images cannot be trained.

    Raises:
        SettingsError: the one that stands against them, and what to do.
    """
    if not has_images(*stores):
        return
    if s.adapter.adapter in VIRTUAL:
        raise SettingsError(
            f"adapter={s.adapter.adapter} and rows with images: virtual tokens move the places of images. Use adapter=lora."
        )
    if s.strategy.cp_size > 1:
        raise SettingsError(
            f"cp_size={s.strategy.cp_size} and rows with images: ranks cannot share such a row. Leave cp_size out."
        )
    if s.strategy.strategy == "zero3":
        raise SettingsError(
            "strategy=zero3 and rows with images: a rank without images in its row would leave the others waiting for its part "
            "of the vision tower. Use strategy=fsdp2 or zero2."
        )


def image_documents(s: Any, tokenizer: Any, *parts: Any) -> list[forge_algos.ImageDocument]:
    """Return two short documents with images of items, one where they have no more, [] without any."""
    parts = tuple(items for items in parts if isinstance(items, Samples))
    if not has_images(*(items.store for items in parts)):
        return []
    inputs, found = _inputs(s, tokenizer), []
    for items in parts:
        store = items.store
        for row in range(len(store)):
            sample = store[row]
            found += [(sample, store.source(row))] if sample.images else []
            if len(found) == _TRIED:
                break
    return [
        forge_algos.ImageDocument(
            sample.input_ids, inputs(sample, place), [(image.start, image.stop) for image in sample.images]
        )
        for sample, place in sorted(found, key=lambda each: len(each[0].input_ids))[:2]
    ]


def _inputs(s: Any, tokenizer: Any) -> forge_data.ImageInputs:
    return forge_data.ImageInputs(s.model.model_path, tokenizer=tokenizer)


def with_images(run: Run) -> Run:
    """Return the run with images read for its rows, each of one sample where the model must have it so.

    Every rank calls this.
    """
    documents = image_documents(run.settings, run.tokenizer, run.train, run.held_out)
    if not documents:
        return run
    packs, why = _packs(run, documents)
    if not packs and run.settings.packing.packing == "on" and not run.settings.origins["packing"].startswith("chosen"):
        raise SettingsError(f"packing=on: {why}. With packing=auto its samples run alone.")
    parts = _parts(run)
    if not packs and any(isinstance(items, Conversations) for items in parts.values()):
        raise SettingsError(
            "turns=auto makes several samples of a row, and this model takes one sample with images in a row; set "
            f"turns=history ({why})"
        )
    run.report.note(f"images: {'several in a row' if packs else 'one sample a row'}: {why}")
    return _reading(run, packs=packs)


def with_rehearsed_images(run: Run) -> Run:
    """Return a run without numbers with images read for its rows, of several samples if any may be."""
    if not has_images(*(items.store for items in _parts(run).values())):
        return run
    return _reading(run, packs=run.settings.packing.packing != "off")


def _parts(run: Run) -> dict[str, Samples]:
    parts = (("train", run.train), ("held_out", run.held_out))
    return {name: items for name, items in parts if isinstance(items, Samples)}


def _reading(run: Run, *, packs: bool) -> Run:
    plan = run.plan.alone() if packs else run.plan.one_a_row()
    inputs = _inputs(run.settings, run.tokenizer)
    read = {name: items.with_images(inputs, one_a_row=not packs) for name, items in _parts(run).items()}
    return attrs.evolve(run, plan=plan, **read)


def _packs(run: Run, documents: list[forge_algos.ImageDocument]) -> tuple[bool, str]:
    if run.settings.packing.packing == "off":
        return False, "packing=off"
    if len(documents) == 1:
        documents *= 2
    with run.strategy.computing(run.model):
        return forge_algos.pack_images(run.model, documents, device=run.device, autocast=run.autocast)
