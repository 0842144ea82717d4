"""Rows that were left out → lines of `dropped.jsonl`, and back."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forge_data._errors import StoreError
from forge_data._values import parsed_json
from forge_data.reading._record import place_of
from forge_data.store._manifest import DROPPED, SourceFile


class Dropped(NamedTuple):
    """A row that was left out, as `dropped.jsonl` holds it."""

    row: int
    reason: str
    tokens: int
    error: str = ""
    """Error for which it was refused, where `on_bad_row` is skip."""


def dropped_lines(file: str, rows: Sequence[Dropped], *, indexed: bool) -> bytes:
    """Write rows of one file as lines of JSON; `indexed` as for `place_of`."""
    lines = []
    for row in rows:
        fields = {"file": file, "row": row.row, "reason": row.reason, "tokens": row.tokens}
        fields |= {"place": place_of(file, row.row, indexed=indexed)} | ({"error": row.error} if row.error else {})
        lines.append(json.dumps(fields, ensure_ascii=False) + "\n")
    return "".join(lines).encode("utf-8", "surrogatepass")


def dropped_rows(directory: Path, sources: Sequence[SourceFile]) -> Iterator[dict[str, Any]]:
    """Read the rows of a store's `dropped.jsonl`, in order.

    Raises:
        StoreError: it cannot be read, or a line is not JSON.
    """
    indexed = {source.name for source in sources if source.indexed}
    path = directory / DROPPED
    try:
        with path.open(encoding="utf-8", errors="surrogatepass") as lines:
            for line in lines:
                row = parsed_json(line)
                # Stores written before 0.2.1 do not hold the place.
                yield (
                    row
                    if "place" in row
                    else row | {"place": place_of(row["file"], row["row"], indexed=row["file"] in indexed)}
                )
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}; prepare the store again") from error
