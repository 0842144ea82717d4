"""Plan files and fingerprints: the inputs of a plan, and a digest of some of its steps.

The steps themselves are not in the file, so it is as small as the data's lengths. The digest shows whether this machine
and version work out the same steps as those that saved the plan, so that no run goes on with other steps unnoticed.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import attrs

from forge_packing._checks import Int64Array
from forge_packing._errors import PackingError
from forge_packing.dividing._cost import Cost
from forge_packing.planning import _npz
from forge_packing.planning._inputs import ARRAYS, NAMES, checked
from forge_packing.planning._steps import Steps

ALGORITHM = 3
"""Version of the planning: it counts up whenever the same input would make other steps."""

ORDER = 1
"""Version of the order: it counts up whenever the same data, batch size and seed would give a step other samples."""

Inputs = Mapping[str, Any]
"""What a plan was made from, by name, as `checked` returns it."""


def fingerprint(inputs: Inputs) -> str:
    """Return the sha256 (hex) of all inputs and ALGORITHM."""
    digest = hashlib.sha256(json.dumps({"algorithm": ALGORITHM, **_parameters(inputs)}, sort_keys=True).encode())
    for name, array in _arrays(inputs).items():
        _update(digest, name, array)
    return digest.hexdigest()


def order_fingerprint(inputs: Inputs) -> str:
    """Return the sha256 (hex) of what decides the samples of each step, and ORDER."""
    decides = ("batch_size", "drop_last", "seed", "shuffle")
    digest = hashlib.sha256(json.dumps({"order": ORDER, **{name: inputs[name] for name in decides}}).encode())
    for name, array in _arrays(inputs).items():
        if name not in ("loss_counts", "widths", "lines", "prefixes", "prefix_tokens", "repeated"):
            _update(digest, name, array)
    return digest.hexdigest()


def save(file: str | os.PathLike[str], inputs: Inputs, steps: Steps) -> None:
    """Write the plan file atomically. Raises PackingError where it cannot be written."""
    verified = {"algorithm": ALGORITHM, "fingerprint": fingerprint(inputs), "steps": _digest(steps)}
    _npz.write(file, {**_parameters(inputs), **verified}, _arrays(inputs))


def load(file: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a plan file: its checked inputs, and the saved digests. Raises PackingError."""
    parameters, arrays = _npz.read(file)
    saved = {name: parameters.pop(name, None) for name in ("algorithm", "fingerprint", "steps")}
    if saved["algorithm"] != ALGORITHM:
        raise PackingError(
            f"{os.fspath(file)} was made by version {saved['algorithm']!r} of the planning; this one is {ALGORITHM}. Plan again"
        )
    values: dict[str, Any] = {**dict.fromkeys(ARRAYS), **parameters, **arrays}
    different = values.keys() ^ NAMES
    if different:
        raise PackingError(f"{os.fspath(file)} is not a plan of this version: it differs in {sorted(different)}. Plan again")
    try:
        return checked({**values, "cost": Cost(**values["cost"])}), saved
    except (PackingError, TypeError) as error:
        raise PackingError(f"{os.fspath(file)} is not a plan: {error}") from error


def compare(file: str | os.PathLike[str], saved: Inputs, inputs: Inputs, steps: Steps) -> None:
    """Compare a loaded plan with the saved digests; PackingError where they differ."""
    if fingerprint(inputs) != saved["fingerprint"]:
        raise PackingError(f"{os.fspath(file)} was changed after it was saved: its fingerprint does not match. Plan again")
    if _digest(steps) != saved["steps"]:
        raise PackingError(
            f"{os.fspath(file)} was saved where its steps were worked out otherwise than here: forge-packing or numpy differ. "
            "Install the versions that it was saved with, or plan again"
        )


def _parameters(inputs: Inputs) -> dict[str, Any]:
    cost = {name: float(weight) for name, weight in attrs.asdict(inputs["cost"]).items()}
    return {**{name: inputs[name] for name in sorted(NAMES - {*ARRAYS, "cost"})}, "cost": cost}


def _arrays(inputs: Inputs) -> dict[str, Int64Array]:
    return {name: inputs[name] for name in ARRAYS if inputs[name] is not None}


def _digest(steps: Steps) -> str:
    """Return the sha256 (hex) of the first block of steps, and of the last where the run ends."""
    total = steps.order.num_steps
    numbers = [0] if total is None else sorted({0, (total - 1) // steps.per_block})
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
