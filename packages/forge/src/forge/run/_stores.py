"""Token stores of a run → verified by their hashes, made again from the rows where damaged.

Each is read whole once a run, on its first rank, before anything trains on it. Later its files' sizes and times are enough.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import forge_data
import forge_dist
from forge._counted import counted
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.saving._directories import remove_at_once
from forge.tasks._task import Task
from forge.tasks.items._items import Items
from forge.tasks.items._media import media_names

STORES = "stores"
"""Entry of run.json: name of each store → its fingerprint, by which one that was lost is known again."""


_MEDIA_FILES = "image_files.bin"
"""File of a store with the places of its images, which is no part of the fingerprint."""


def fingerprints(task: Task, root: Path, names: Iterable[str]) -> dict[str, str]:
    """Verify the stores of a run that begins, and return the fingerprint of each.

    Raises:
        forge_data.StoreError: a file does not hold what was written to it a moment ago.

    """
    found = {}
    for name in names:
        store = task.open_store(root / "data" / name)
        store.verify()
        found[name] = store.fingerprint
    return found


def link_stores(task: Task, path: Path, staging: Path) -> None:
    """Link stores that can be opened to the staging folder, for `prepare` to reuse or replace."""
    for name in sorted(entry.name for entry in (path / "data").glob("*/")):
        if isinstance(_opened(task, path / "data" / name), forge_data.StoreError):
            continue
        copy = staging / "data" / name
        copy.parent.mkdir(exist_ok=True)
        copy_linked(path / "data" / name, copy)


def compare_stores(task: Task, path: Path, prepared: Path, settings: Mapping[str, str], report: Reporter) -> None:
    """Verify the stores of a run; one that was lost or damaged becomes the one prepared now.

    Args:
        task: the verb.
        path: the run directory.
        prepared: folder in which the stores were prepared now.
        settings: store → setting that names its rows.
        report: gets what is wrong with one, and what takes time.

    Raises:
        SettingsError: the rows are not those that the run was made with, or nothing proves that they are.

    """
    recorded = json.loads((path / "run.json").read_text(encoding="utf-8")).get(STORES)
    # An earlier version's has none.
    recorded = {name: str(found) for name, found in recorded.items()} if isinstance(recorded, dict) else {}
    for name, which in settings.items():
        kept, made = path / "data" / name, prepared / "data" / name
        found, new = _opened(task, kept), task.open_store(made)
        was: Any = recorded.get(name) or getattr(found, "fingerprint", None)
        fault = found if isinstance(found, forge_data.StoreError) else _fault(found, made, was)
        if was is None:
            raise SettingsError(
                f"ckpt_output_dir {path}: its data/{name}, which its run was made with, cannot be read ({fault}), and its "
                "run.json does not hold the fingerprint that would prove another store equal. Put it back, or give another "
                "ckpt_output_dir."
            )
        if was != new.fingerprint:
            damaged = f" Its data/{name} is damaged besides ({fault})." if fault else ""
            differs = f"tokens {was[:12]} then, {new.fingerprint[:12]} now" if fault else _difference(found, new, report)
            raise SettingsError(
                f"ckpt_output_dir {path}: the rows of {which} are not those that its run was made with ({differs}): the rows, "
                f"their media, the tokenizer or its template changed.{damaged} Put them back, or give another "
                "ckpt_output_dir."
            )
        moved = fault is None and found.sha256.get(_MEDIA_FILES) != new.sha256.get(_MEDIA_FILES)
        if moved:
            report.note(f"{media_names(new)} of {which} are read from where its rows name them now: they are those of the run")
        if fault is not None:
            report.note(
                f"WARNING: {fault}. It was made again from the rows of {which}: their tokens have the run's fingerprint"
            )
        if fault is not None or moved:
            new.verify()
            if kept.exists():
                remove_at_once(kept)
            kept.parent.mkdir(exist_ok=True)
            copy_linked(made, kept)


def _difference(then: Any, now: Any, report: Reporter) -> str:
    """Say which samples of two stores differ."""
    if len(then) != len(now):
        return f"{counted(len(then), 'samples')} then, {len(now):,} now"
    # All tokens of both are read for it.
    report.doing(f"the rows are others than the run's: comparing {counted(len(now), 'samples')} to say which")
    (samples, digests), (_, others) = now.units(), then.units()
    differ = (digests != others).nonzero()[0]
    if not len(differ):
        return "the same token ids, but other labels, weights or further columns"
    return f"{len(differ):,} of {len(samples):,} differ, first {now.source(int(samples[differ[0], 0]))}"


def verify_on_node(ranks: forge_dist.Ranks, *parts: Items | None) -> None:
    """Verify the stores on each further node; the first rank did when it prepared them."""
    if ranks.local_rank == 0 and not ranks.is_first:
        # The parts of a split share their files.
        for store in {items.store.path: items.store for items in parts if items is not None}.values():
            store.verify()


def refuse_damaged(*parts: Items | None) -> None:
    """Raise StoreError where a store that is being trained on does not hold its bytes any more.

    Only files that were written to since it was opened are read, so that this may be called before each full state.
    """
    for items in parts:
        if items is None:
            continue
        try:
            items.store.verify(changed=True)
        except forge_data.StoreError as error:
            raise forge_data.StoreError(
                f"{error}: the run, which reads it, is stopped before it saves what it learned since its last full state. The "
                "same command makes the store again and goes on from that state"
            ) from error


def copy_linked(directory: Path, copy: Path) -> None:
    """Copy a directory whose files never change, by links where the file system has them."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    shutil.copytree(directory, copy, copy_function=link)


def _opened(task: Task, directory: Path) -> Any:
    """Open a store; return the error where it cannot be opened."""
    try:
        return task.open_store(directory)
    except forge_data.StoreError as error:
        return error


def _fault(store: Any, verified: Path, fingerprint: str) -> forge_data.StoreError | None:
    """Verify a store, unless its files are those of one that `prepare` verified already."""
    if store.fingerprint != fingerprint:
        return forge_data.StoreError(f"{store.path} was replaced: its fingerprint is {store.fingerprint}, not {fingerprint}")
    try:
        if not all(_same(store.path / name, verified / name) for name in store.sha256):
            store.verify()
    except forge_data.StoreError as error:
        return error
    return None


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def whole_stores(task: Task, path: Path) -> dict[str, Path]:
    """Return setting → store of a run, for those whose bytes have the fingerprint in run.json."""
    try:
        recorded = json.loads((path / "run.json").read_text(encoding="utf-8"))[STORES]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    found = {}
    for name, setting in (("train", "data_path"), ("eval", "eval_data_path")):
        store = _opened(task, path / "data" / name)
        if name in recorded and not isinstance(store, forge_data.StoreError) and store.fingerprint == recorded[name]:
            with suppress(forge_data.StoreError):
                store.verify()
                found[setting] = path / "data" / name
    return found
