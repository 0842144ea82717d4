"""Token store → JSONL of token ids, as mini-trainer reads it.

A line is `{"input_ids": [...], "labels": [...], "len": n}`, with `"weights": [...]` where tokens count differently.
"""

import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from forge_data._errors import StoreError
from forge_data._example import TokenizedExample
from forge_data._paths import expand_user


def write_jsonl(examples: Iterable[TokenizedExample], store: Path, file: str | os.PathLike[str]) -> Path:
    """Write every example of the store in directory `store` as a line.

    The file gets its name when it is complete.

    Raises:
        StoreError: the file cannot be written.
    """
    path = expand_user(file, StoreError)
    if not path.name or store.resolve() in path.resolve().parents:
        raise StoreError(f"{str(path)!r} cannot be written: it must be a file, and outside of the store {store}")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("x", encoding="ascii") as lines:
            for example in examples:
                ids = example.input_ids.tolist()
                row = {"input_ids": ids, "labels": example.labels.tolist(), "len": len(ids)}
                if example.weights is not None:
                    row["weights"] = example.weights.tolist()
                lines.write(json.dumps(row, separators=(",", ":")) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path
