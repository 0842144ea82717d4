"""Held-out samples of a run's training store, in a JSON file beside the store."""

import json
from pathlib import Path

from forge_data._errors import StoreError

FILE = "held_out.json"
"""Name of the file, in the folder that the store is in."""


def write_held_out(directory: Path, samples: list[int]) -> None:
    """Write the indices of the samples that are held out of the store in `directory`, beside it."""
    (directory.parent / FILE).write_text(json.dumps({"samples": samples}) + "\n", encoding="utf-8")


def held_out_of(directory: Path, count: int) -> frozenset[int]:
    """Read which of the store's `count` samples are held out; none without a file.

    Raises:
        StoreError: the file is not one of such indices.
    """
    file = directory.parent / FILE
    try:
        samples = json.loads(file.read_bytes())["samples"]
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file} cannot be read ({error!r}); remove it, and no sample is shown as held out") from error
    if not isinstance(samples, list) or not all(type(index) is int and 0 <= index < count for index in samples):
        raise StoreError(
            f"{file} names samples that {directory} does not have (it has 0 to {count - 1}); remove it, and no sample is shown "
            "as held out"
        )
    return frozenset(samples)
