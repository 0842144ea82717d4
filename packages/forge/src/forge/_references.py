"""A model before its first step → what it says of every completion, kept beside the token store; and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import forge_algos
import forge_dist
from forge._offline import divided
from forge._pairs import Pairs, References
from forge._task import Items, Run


def refer(run: Run, parts: dict[str, Items | None]) -> None:
    """Compute the reference's log-probabilities of all items, divided over the ranks, unless the run has them already."""
    own = run.settings.objective
    missing = {
        name: items
        for name, items in parts.items()
        if isinstance(items, Pairs) and run.ranks.broadcast(_read(run, name, items) is None)
    }
    if not missing:
        return
    model = run.model if own.reference_path is None else run.load_frozen(own.reference_path)
    share, _ = forge_algos.shares_prompts(model, device=run.device)
    for name, items in missing.items():
        rows = divided(run, items)
        found = np.zeros((2, len(items), 2))
        batches = (items.groups(indices, share_prompt=share) for indices in rows)
        scored = forge_algos.reference_logps(model, batches, device=run.device, autocast=run.autocast)
        for indices, (logps, tails) in zip(rows, scored, strict=True):
            found[0, indices], found[1, indices] = np.reshape(logps, (-1, 2)), np.reshape(tails, (-1, 2))
        # Every item was some rank's, and zero on the others: their sum is exact.
        total = np.array(run.strategy.sum(found.ravel().tolist()), dtype=np.float32).reshape(found.shape)
        file, about = _file(run.root, name), _about(run, items)

        def write(file: Path = file, total: np.ndarray = total, about: dict[str, str] = about) -> None:
            temporary = file.with_name(f".{file.name}.tmp")
            save_file({"logps": total[0], "tails": total[1]}, temporary, metadata=about)
            temporary.replace(file)

        run.ranks.first(write)
        run.report.note(f"reference: scored {items} once, before training")


def read_references(run: Run, name: str, items: Pairs) -> References:
    """Read what `refer` wrote. Raises SettingsError where it is gone."""
    found = _read(run, name, items)
    if found is None:
        raise forge_dist.CheckpointError(
            f"{_file(run.root, name)}: the reference's log-probabilities are not those of this data and model. Remove the file: they are computed anew."
        )
    return found


def _read(run: Run, name: str, items: Pairs) -> References | None:
    try:
        with safe_open(_file(run.root, name), framework="numpy") as opened:
            if opened.metadata() != _about(run, items):
                return None
            return References(logps=opened.get_tensor("logps"), tails=opened.get_tensor("tails"))
    except (OSError, SafetensorError):
        return None


def _file(root: Path, name: str) -> Path:
    return root / "data" / f"{name}.reference.safetensors"


def _about(run: Run, items: Items) -> dict[str, str]:
    """What the numbers belong to: these tokens, these weights, this arithmetic."""
    model: Any = run.identity.get("reference_path", run.identity["model"])
    return {"store": items.store.fingerprint, "model": model, "dtype": json.dumps(run.settings.device.dtype)}
