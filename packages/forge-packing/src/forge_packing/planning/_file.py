"""A BatchPlan to its file and back: what it was made from, its fingerprint, and a digest of some of its steps.

The steps themselves are not in the file, so it is as small as the data's lengths. The digest says whether who loads the
plan works out the very same steps; nobody trains on others unnoticed.
"""

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import attrs

from forge_packing._checks import Int64Array
from forge_packing._errors import PackingError
from forge_packing.dividing._cost import Cost
from forge_packing.planning import _npz as _archive
from forge_packing.planning._inputs import checked

if TYPE_CHECKING:
    from forge_packing.planning._batch_plan import BatchPlan

ALGORITHM = 3
"""Counts up whenever the same input would make other steps."""

ORDER = 1
"""Counts up whenever the same data, batch size and seed would make steps of other samples."""

_ARRAYS = ("lengths", "loss_counts", "sources", "weights")


def fingerprint(plan: "BatchPlan") -> str:
    """sha256 (hex) over the parameters, the arrays and ALGORITHM."""
    digest = hashlib.sha256(json.dumps({"algorithm": ALGORITHM, **_parameters(plan)}, sort_keys=True).encode())
    for name, array in _arrays(plan).items():
        _update(digest, name, array)
    return digest.hexdigest()


def order_fingerprint(plan: "BatchPlan") -> str:
    """sha256 (hex) over what decides which samples a step holds, and ORDER."""
    decides = ("batch_size", "drop_last", "seed", "shuffle")
    digest = hashlib.sha256(json.dumps({"order": ORDER, **{name: getattr(plan, name) for name in decides}}).encode())
    for name, array in _arrays(plan).items():
        if name != "loss_counts":
            _update(digest, name, array)
    return digest.hexdigest()


def save(plan: "BatchPlan", file: str | os.PathLike[str]) -> None:
    """Write the plan, whole or not at all. Raises PackingError where it cannot be written."""
    extra = {"algorithm": ALGORITHM, "fingerprint": plan.fingerprint, "steps": _digest(plan)}
    _archive.write(file, {**_parameters(plan), **extra}, _arrays(plan))


def load(file: str | os.PathLike[str]) -> dict[str, Any]:
    """`inputs` of a BatchPlan, checked, and the `fingerprint` and `steps` that were saved. Raises PackingError."""
    parameters, arrays = _archive.read(file)
    found = {name: parameters.pop(name, None) for name in ("algorithm", "fingerprint", "steps")}
    if found["algorithm"] != ALGORITHM:
        raise PackingError(
            f"{os.fspath(file)} was made by version {found['algorithm']!r} of the planning; this one is {ALGORITHM}. Plan again"
        )
    values: dict[str, Any] = {**dict.fromkeys(_ARRAYS), **parameters, **arrays}
    different = values.keys() ^ _names()
    if different:
        raise PackingError(f"{os.fspath(file)} is not a plan of this version: it differs in {sorted(different)}. Plan again")
    try:
        inputs = checked({**values, "cost": Cost(**values["cost"])})
    except (PackingError, TypeError) as error:
        raise PackingError(f"{os.fspath(file)} is not a plan: {error}") from error
    return {**found, "inputs": inputs}


def compare(plan: "BatchPlan", file: str | os.PathLike[str], saved: dict[str, Any]) -> None:
    """Raise PackingError unless the plan is the one that was saved, and its steps are worked out as they were then."""
    if plan.fingerprint != saved["fingerprint"]:
        raise PackingError(f"{os.fspath(file)} was changed after it was saved: its fingerprint does not match. Plan again")
    if _digest(plan) != saved["steps"]:
        raise PackingError(
            f"{os.fspath(file)} was saved where its steps were worked out otherwise than here: forge-packing or numpy differ. "
            "Install the versions that it was saved with, or plan again"
        )


def _names() -> set[str]:
    from forge_packing.planning._batch_plan import BatchPlan

    return {field.name for field in attrs.fields(BatchPlan)}


def _parameters(plan: "BatchPlan") -> dict[str, Any]:
    names = sorted(_names() - {*_ARRAYS, "cost"})
    cost = {name: float(weight) for name, weight in attrs.asdict(plan.cost).items()}
    return {**{name: getattr(plan, name) for name in names}, "cost": cost}


def _arrays(plan: "BatchPlan") -> dict[str, Int64Array]:
    arrays = {name: getattr(plan, name) for name in _ARRAYS}
    return {name: array for name, array in arrays.items() if array is not None}


def _digest(plan: "BatchPlan") -> str:
    """sha256 over the first block of steps, and the last where the run ends: samples, passes and micro-batches."""
    steps = plan._steps
    numbers = [0] if plan.endless else sorted({0, (plan.num_steps - 1) // steps.per_block})
    digest = hashlib.sha256()
    for number in numbers:
        block = steps.divided(number)
        _update(digest, "samples", block.ordered.samples)
        for name in ("members", "micro_batch_starts", "pass_starts"):
            _update(digest, name, getattr(block, name))
    return digest.hexdigest()


def _update(digest: Any, name: str, array: Int64Array) -> None:
    digest.update(f"{name}:{array.size};".encode())
    digest.update(array.astype("<i8", copy=False).tobytes())
