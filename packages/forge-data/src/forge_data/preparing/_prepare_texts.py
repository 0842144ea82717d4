"""Rows of labelled texts → store of prompts that are read whole, for classifiers."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from forge_data._options import TextOptions
from forge_data._settings import MAX_BAD_ROWS
from forge_data.formats.questions._texts import labelled
from forge_data.preparing._prepare_prompts import prepare_questions
from forge_data.reading._sources import DataPath
from forge_data.store._prompt_store import PromptStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare_labelled(
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
    chat_template: str | os.PathLike[str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    media: bool = False,
    as_messages: bool = False,
    generation_prompt: bool = False,
    seed: int = 0,
    shard: str | None = None,
) -> PromptStore:
    """Write the labelled texts of files as a store in `store_dir`, for a sequence classifier.

    A row has `text` or `messages`, and `label` (a text or a whole number) or `labels` (a list of them), which are the columns
    of its `Prompt`; its other fields are not kept. A text is tokenised as `tokenizer(text)` does, with all special tokens;
    messages by the chat template, without a generation prompt.

    Args:
        data_path: as for `prepare_prompts`.
        tokenizer: as for `prepare_prompts`.
        store_dir: as for `prepare_prompts`.
        preprocess: as for `prepare_prompts`.
        rename_columns: as for `prepare_prompts`, such as {"sentence": "text"}.
        on_bad_row: as for `prepare_prompts`.
        max_bad_rows: as for `prepare_prompts`.
        max_samples: as for `prepare`.
        max_seq_len: longest text in tokens; no limit by default.
        on_overflow: what becomes of a longer one: `drop` (left out and counted), `truncate` (its first tokens stay) or `error`.
        chat_template: as for `prepare_prompts`.
        chat_template_kwargs: as for `prepare_prompts`.
        system_prompt: as for `prepare_prompts`.
        media: whether rows may have images, in their messages or in columns, as `forge classify` trains with them. A text
            beside such a column is the user's message, and a row with such a column needs none.
        as_messages: whether every text is the user's message.
        generation_prompt: whether messages end with the chat template's generation prompt.
        seed: as for `prepare_prompts`.
        shard: as for `prepare_prompts`.

    Raises:
        DataError: a file, or a row of it by `file:row`: no text, no label, both kinds of them, or a label of another type.
        TemplateError: rows of messages and no chat template.
        TokenizerError: no tokenizer there, or one without offsets; or there are images, and the model has no processor of them.
        StoreError: `store_dir` holds something else, or cannot be written.
    """
    options = TextOptions(
        max_seq_len=max_seq_len,
        on_overflow=on_overflow,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
        rename_columns=rename_columns,
        on_bad_row=on_bad_row,
        max_bad_rows=max_bad_rows,
        max_samples=max_samples,
        media=media,
        as_messages=as_messages,
        generation_prompt=generation_prompt,
    )
    read = partial(labelled, as_messages=as_messages)
    return prepare_questions(data_path, tokenizer, store_dir, options, read, preprocess=preprocess, seed=seed, shard=shard)
