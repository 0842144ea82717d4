"""Rows of queries and documents → store of prompts that hold several texts, for embeddings."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from forge_data._options import PairOptions
from forge_data._settings import MAX_BAD_ROWS
from forge_data.formats.questions._text_pairs import text_pair
from forge_data.preparing._prepare_prompts import prepare_questions
from forge_data.reading._sources import DataPath
from forge_data.store._prompt_store import PromptStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare_text_pairs(
    data_path: DataPath,
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]",
    store_dir: str | os.PathLike[str],
    *,
    preprocess: str | Callable[[dict[str, Any]], Any] | None = None,
    rename_columns: Mapping[str, str] | None = None,
    on_bad_row: str = "error",
    max_bad_rows: float = MAX_BAD_ROWS,
    max_samples: int | None = None,
    max_seq_len: int | None = None,
    on_overflow: str = "drop",
    query_prefix: str = "",
    document_prefix: str = "",
    media: bool = False,
    as_messages: bool = False,
    generation_prompt: bool = False,
    seed: int = 0,
    shard: str | None = None,
) -> PromptStore:
    """Write queries with their documents as a store in `store_dir`, for embeddings.

    A row has a query (`query`, `anchor` or `question`), its document (`positive`, `document` or `answer`), and any hard
    negatives (`negative`, a text; `negatives`, a list; or `negative_1`, `negative_2` and so on), all plain texts. A prefix is
    put before each, and it is tokenised as `tokenizer(text)` does, with all special tokens and no others: an end token is
    there if the tokenizer writes one. With `media` a text may be messages too, the content of one (`[{"type": "image", ...}]`),
    or an object (`{"image": ..., "text": ...}`), which the chat template writes, without a generation prompt; a prefix is the
    system message before them.

    A `Prompt` of the store has the query as its `prompt`, the tokens of query, document and negatives one after another, and
    the columns `positive`, `negatives` and `lengths`, the number of tokens of each text. Other fields are not kept.

    Args:
        data_path: as for `prepare_prompts`.
        tokenizer: as for `prepare_prompts`.
        store_dir: as for `prepare_prompts`.
        preprocess: as for `prepare_prompts`.
        rename_columns: as for `prepare_prompts`, such as {"sentence1": "anchor", "sentence2": "positive"}.
        on_bad_row: as for `prepare_prompts`.
        max_bad_rows: as for `prepare_prompts`.
        max_samples: as for `prepare`.
        max_seq_len: longest text in tokens; no limit by default.
        on_overflow: what becomes of a row with a longer one: `drop` (left out and counted), `truncate` (the tokenizer cuts the
            text, and special tokens at its end stay) or `error`.
        query_prefix: put before each query, such as "query: ".
        document_prefix: put before each document and negative, such as "passage: ".
        media: whether texts may have images, as `forge embed` trains with them.
        as_messages: whether every text is the user's message, as sentence-transformers has it of a model of several modalities.
        generation_prompt: whether messages end with the chat template's generation prompt.
        seed: as for `prepare_prompts`.
        shard: as for `prepare_prompts`.

    Raises:
        DataError: a file, or a row of it by `file:row`: a text that is missing, given twice, empty or no text.
        TokenizerError: no tokenizer there; or there are images, and the model has no processor of them.
        TemplateError: messages, and no chat template.
        StoreError: `store_dir` holds something else, or cannot be written.
    """
    options = PairOptions(
        max_seq_len=max_seq_len,
        on_overflow=on_overflow,
        query_prefix=query_prefix,
        document_prefix=document_prefix,
        rename_columns=rename_columns,
        on_bad_row=on_bad_row,
        max_bad_rows=max_bad_rows,
        max_samples=max_samples,
        media=media,
        as_messages=as_messages,
        generation_prompt=generation_prompt,
    )
    read = partial(text_pair, query_prefix=query_prefix, document_prefix=document_prefix, as_messages=as_messages)
    return prepare_questions(data_path, tokenizer, store_dir, options, read, preprocess=preprocess, seed=seed, shard=shard)
