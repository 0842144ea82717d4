"""JSONL of token ids, as mini-trainer writes it → token store.

A line is `{"input_ids": [...], "labels": [...], "len": n}`.
"""

import os
from typing import TYPE_CHECKING

from forge_data._errors import StoreError
from forge_data._options import Options
from forge_data._paths import expand_user
from forge_data.preparing._job import Job
from forge_data.preparing._prepare import build
from forge_data.reading._sources import resolve
from forge_data.store._publish import require_room
from forge_data.tokenizing._tokenizer import as_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forge_data.store._token_store import TokenStore


def read_jsonl(
    file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str] | None",
) -> "TokenStore":
    """Write the rows of such a file as a store, checked as `prepare` checks rows of token ids."""
    where = expand_user(directory, StoreError)
    require_room(where)
    sources = resolve(file)
    loaded = as_tokenizer(tokenizer) if tokenizer is not None else None
    return build(Job(tokenizer=loaded, options=Options(format="tokenised")), sources, where, num_proc=None)
