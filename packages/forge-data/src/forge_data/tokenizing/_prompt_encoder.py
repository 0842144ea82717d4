"""Questions to the tokens that a model goes on from."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data.chat_template._template import ChatTemplate
from forge_data.formats._prompts import Question
from forge_data.formats._samples import Chat

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Turns questions into ids with one tokenizer and its chat template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    def encode(self, questions: Sequence[Question]) -> list["NDArray[np.int32]"]:
        """int32[S] of each: of messages what the template writes when it is asked for the assistant's turn, of text the tokenizer's own.

        Raises:
            DataError, TemplateError: by the question's place; the first one in order.
        """
        written = [self._template.prompt(asked.prompt) for asked in questions if isinstance(asked.prompt, Chat)]
        texts = [asked.prompt for asked in questions if isinstance(asked.prompt, str)]
        # One call for text, which gets the tokenizer's own special tokens, and one for conversations, which have theirs.
        chats, plain = iter(self._ids(written, special=False)), iter(self._ids(texts, special=True))
        return [next(chats if isinstance(asked.prompt, Chat) else plain) for asked in questions]

    def _ids(self, texts: list[str], *, special: bool) -> list["NDArray[np.int32]"]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            add_special_tokens=special,
            return_offsets_mapping=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        places = encoded["offset_mapping"] if special else [None] * len(texts)
        return [self._open(ids, at) for ids, at in zip(encoded["input_ids"], places, strict=True)]

    def _open(self, ids: list[int], places: Any) -> "NDArray[np.int32]":
        """Ids without the EOS that some tokenizers write behind every text: a prompt goes on."""
        stop = len(ids)
        while places is not None and stop and ids[stop - 1] == self._tokenizer.eos_token_id and stop > self._beginning(places):
            stop -= 1
        return np.array(ids[:stop], dtype=np.int32)

    @staticmethod
    def _beginning(places: list[tuple[int, int]]) -> int:
        """How many tokens there are up to the last that stands for characters; a BOS alone is one of them."""
        return next((at + 1 for at in reversed(range(len(places))) if places[at][0] != places[at][1]), 1)
