"""Held-out samples of a run's training store, in a JSON file beside the store."""

import json
from pathlib import Path

from forge_data._errors import StoreError


def file_beside(directory: Path) -> Path:
    """Return where the held-out samples of the store in `directory` are written."""
    # By its own name, however it is opened: as `.`, or through a link.
    directory = directory.resolve()
    return directory.parent / f"{directory.name}.held_out.json"


def write_held_out(directory: Path, fingerprint: str, samples: list[int]) -> None:
    """Write which samples of the store in `directory` are held out, beside it."""
    file_beside(directory).write_text(json.dumps({"store": fingerprint, "samples": samples}) + "\n", encoding="utf-8")


def held_out_of(directory: Path, fingerprint: str, count: int) -> frozenset[int]:
    """Read which of the store's `count` samples are held out.

    None are without a file, or with one of another store.

    Raises:
        StoreError: the file is not one of such indices.
    """
    file = file_beside(directory)
    try:
        found = json.loads(file.read_bytes())
        of, samples = found["store"], found["samples"]
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"{file} cannot be read ({error!r}); remove it, and no sample is shown as held out") from error
    if of != fingerprint:
        return frozenset()
    if not isinstance(samples, list) or not all(type(index) is int and 0 <= index < count for index in samples):
        raise StoreError(
            f"{file} names samples that {directory} does not have (it has 0 to {count - 1}); remove it, and no sample is shown "
            "as held out"
        )
    return frozenset(samples)
