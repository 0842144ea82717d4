"""A token store to JSONL and back, in mini-trainer's form: `{"input_ids": [...], "labels": [...], "len": n}` a line."""

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_data._errors import StoreError
from forge_data._paths import at_home

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forge_data.store._token_store import TokenStore


def write_jsonl(store: "TokenStore", file: str | os.PathLike[str]) -> Path:
    """Every sample of a store as a line; the file gets its name when it is whole.

    Raises:
        StoreError: the file cannot be written.
    """
    path = at_home(file, StoreError)
    if not path.name or store.path.resolve() in path.resolve().parents:
        raise StoreError(f"{str(path)!r} cannot be written: it must be a file, and outside of the store {store.path}")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("x", encoding="ascii") as lines:
            for example in store:
                ids = example.input_ids.tolist()
                row = {"input_ids": ids, "labels": example.labels.tolist(), "len": len(ids)}
                lines.write(json.dumps(row, separators=(",", ":")) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_jsonl(
    file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str] | None",
) -> "TokenStore":
    """The rows of such a file as a store, checked as `prepare` checks rows that are tokens already."""
    from forge_data._options import Options
    from forge_data.preparing._job import Job
    from forge_data.preparing._prepare import build
    from forge_data.reading._sources import resolve
    from forge_data.store._publish import require_room
    from forge_data.tokenizing._tokenizer import as_tokenizer

    where = at_home(directory, StoreError)
    require_room(where)
    sources = resolve(file)
    loaded = as_tokenizer(tokenizer) if tokenizer is not None else None
    return build(Job(tokenizer=loaded, options=Options(format="tokenised")), sources, where, num_proc=None)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file of ours.

    Raises:
        StoreError: it cannot be read, or a line is no JSON.
    """
    try:
        with path.open(encoding="utf-8", errors="surrogatepass") as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}; prepare the store again") from error
