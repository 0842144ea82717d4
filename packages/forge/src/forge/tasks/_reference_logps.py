"""Reference model → log-probabilities of every completion, stored beside the token store."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import forge_algos
import forge_dist
from forge._counted import counted
from forge._disk import write_remedy
from forge._errors import RunWriteError
from forge.tasks._media import media_of
from forge.tasks._offline import shard_of
from forge.tasks._sharing import may_share
from forge.tasks._task import Run
from forge.tasks.items._items import Ints, Items
from forge.tasks.items._pairs import Pairs, References


def store_references(run: Run, parts: dict[str, Items | None]) -> None:
    """Compute and store the reference log-probabilities of all items that the run uses.

    The work is divided over the data-parallel ranks. What is stored already is not computed again.

    Raises:
        forge_algos.LossError: the reference gives a row no finite number; on all ranks.

    """
    own = run.settings.objective
    missing = {}
    for name, items in parts.items():
        if isinstance(items, Pairs):
            known = _read(run, name, items)
            unknown = np.ones(len(items), bool) if known is None else np.any(~np.isfinite(known.logps), axis=1)
            wanted = _used(run, items)
            rows = wanted[unknown[wanted]]
            if run.ranks.broadcast(len(rows)):
                missing[name] = items, rows, known
    if not missing:
        return
    media = media_of(run)
    model = run.model if own.reference_path is None else run.load_frozen(own.reference_path)
    may, _ = forge_algos.shares_prompts(model, device=run.device, autocast=run.autocast)
    share = may and may_share(run.settings) and media is None
    for name, (items, rows, known) in missing.items():
        run.report.note(f"reference: scoring {len(rows):,} of {len(items):,} {items.noun}, once")
        shared = items.using(share_prompt=share, share_prefix=share, references=None)
        shared = shared if media is None else media.of(shared)
        mine = [rows[part] for part in shard_of(run, shared, rows)]
        found, done, number = np.zeros((len(items), items.completions)), 0, sum(map(len, mine))
        show = run.report.progress(f"scoring {items.noun} with the reference")
        batches = (row for indices in mine for row in shared.scored(indices, share=share))
        more = {"ld_alpha": getattr(own, "ld_alpha", None)}
        scored = forge_algos.reference_logps(model, batches, device=run.device, autocast=run.autocast, **more)
        for indices, logps in zip(mine, zip(*[scored] * shared.rows_scored, strict=True), strict=True):
            found[indices] = np.stack(logps, axis=-1).reshape(-1, items.completions)
            done += len(indices)
            show(done, number)
        # Every row was scored in one shard and is zero in the others: their sum is exact.
        total = np.array(run.strategy.sum(found.ravel().tolist())).reshape(found.shape)
        _refuse_not_finite(run, items, rows[~np.isfinite(total[rows]).all(axis=1)])
        whole = np.full(found.shape, np.nan) if known is None else known.logps.astype(np.float64)
        whole[rows] = total[rows]
        run.ranks.first(partial(_write, _file(run.root, name), whole.astype(np.float32), _key(run, items)))


def _refuse_not_finite(run: Run, items: Pairs, rows: Ints) -> None:
    """Raise LossError for rows whose log-probabilities are NaN or infinite."""
    if not len(rows):
        return
    s = run.settings
    path = s.objective.reference_path or s.model.model_path
    others = f", nor {counted(len(rows) - 1, 'others')}" if len(rows) > 1 else ""
    raise forge_algos.LossError(
        f"{items.source(int(rows[0]))}: the reference {path} gives this row no finite log-probability{others}. Its weights are "
        f"NaN or infinite, or overflow with dtype={s.device.dtype}: give another model, or dtype=float32."
    )


def make_up_references(run: Run) -> None:
    """Store zeros in the place of a reference's log-probabilities, for a run that is not made."""
    if getattr(run.settings.objective, "reference", None) != "stored":
        return
    for name, items in (("train", run.train), ("eval", run.held_out)):
        if isinstance(items, Pairs):
            _file(run.root, name).parent.mkdir(exist_ok=True)
            _write(_file(run.root, name), np.zeros((len(items), items.completions), np.float32), _key(run, items))


def read_references(run: Run, name: str, items: Pairs) -> References:
    """Read what `store_references` wrote. Raises CheckpointError where it is gone."""
    found = _read(run, name, items)
    if found is None:
        raise forge_dist.CheckpointError(
            f"{_file(run.root, name)}: the reference's log-probabilities are not those of this data and model. Remove the "
            "file: they are computed anew."
        )
    return found


def _used(run: Run, items: Pairs) -> Ints:
    """Return int64[n], ascending: training items that the plan contains, or all held-out ones."""
    if items is not run.train or run.plan.endless or run.plan.num_samples >= len(items):
        return np.arange(len(items), dtype=np.int64)
    return np.unique(np.concatenate([run.plan.samples(step) for step in range(run.plan.num_steps)]))


def _read(run: Run, name: str, items: Pairs) -> References | None:
    """Read stored log-probabilities; None where missing, damaged, or of another key."""
    try:
        with safe_open(_file(run.root, name), framework="numpy") as opened:
            key = opened.metadata() or {}
            found = References(logps=opened.get_tensor("logps"))
    except (OSError, SafetensorError):
        return None
    whole = found.logps.shape == (len(items), items.completions)
    return found if whole and key == {**_key(run, items), "sha256": _digest(found.logps)} else None


def _write(file: Path, logps: np.ndarray, key: dict[str, str]) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        save_file({"logps": logps}, temporary, metadata={**key, "sha256": _digest(logps)})
        temporary.replace(file)
    except (OSError, SafetensorError) as error:
        raise RunWriteError(
            f"{file}: the reference's log-probabilities cannot be written: {error}. "
            f"Start again after that: {write_remedy(error)}."
        ) from error


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def _file(root: Path, name: str) -> Path:
    return root / "data" / f"{name}.reference.safetensors"


def _key(run: Run, items: Items) -> dict[str, str]:
    """Return what the stored numbers depend on: tokens, their weights, model, dtype."""
    model: Any = run.identity.get("reference_path", run.identity["model"])
    adapter = {"adapter": run.adapter} if run.adapter and "reference_path" not in run.identity else {}
    ld_alpha = getattr(run.settings.objective, "ld_alpha", None)
    weighted = {} if ld_alpha is None else {"ld_alpha": json.dumps(ld_alpha)}
    return {
        **weighted,
        "store": items.store.fingerprint,
        "model": model,
        **adapter,
        "dtype": json.dumps(run.settings.device.dtype),
    }
