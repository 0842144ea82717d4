"""Token store → JSONL of token ids, as mini-trainer reads it.

A line is `{"input_ids": [...], "labels": [...], "len": n}`, with `"weights": [...]` where tokens count differently.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from forge_data._errors import StoreError
from forge_data._example import TokenizedExample
from forge_data._paths import expand_user
from forge_data.store._publish import new_file


def write_jsonl(examples: Iterable[TokenizedExample], store: Path, file: str | os.PathLike[str]) -> Path:
    """Write every example of the store in directory `store` as a line.

    The file gets its name when it is complete.

    Raises:
        StoreError: the file cannot be written.
    """
    with new_file(file, store) as partial, partial.open("x", encoding="ascii") as lines:
        for example in examples:
            ids = example.input_ids.tolist()
            row = {"input_ids": ids, "labels": example.labels.tolist(), "len": len(ids)}
            if example.weights is not None:
                row["weights"] = example.weights.tolist()
            lines.write(json.dumps(row, separators=(",", ":")) + "\n")
    return expand_user(file, StoreError)
