"""The rows that were left out, as lines of `dropped.jsonl` and back."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forge_data.preparing._batch import Dropped
from forge_data.reading._record import place_of
from forge_data.store._manifest import DROPPED, SourceFile


def dropped_lines(file: str, rows: Sequence[Dropped], *, indexed: bool) -> bytes:
    """The lines of some rows of one file; `indexed` as `place_of` has it."""
    told = ({"file": file, **row._asdict(), "place": place_of(file, row.row, indexed=indexed)} for row in rows)
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in told).encode("utf-8", "surrogatepass")


def dropped_rows(directory: Path, sources: Sequence[SourceFile]) -> Iterator[dict[str, Any]]:
    """The rows of a store's file, in order."""
    from forge_data.store._jsonl import lines_of

    indexed = {source.name for source in sources if source.indexed}
    for row in lines_of(directory / DROPPED):
        # Before 0.2.1 the place was left to be worked out.
        yield row if "place" in row else row | {"place": place_of(row["file"], row["row"], indexed=row["file"] in indexed)}
