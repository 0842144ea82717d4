"""Samples to ids and labels: rendered, tokenised a batch at a time, masked."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from forge_data._errors import TokenizerError
from forge_data._example import TokenizedExample
from forge_data._mask import Span, trained_tokens
from forge_data._offsets import Offsets
from forge_data._samples import Chat, Sample, Text
from forge_data._template import ChatTemplate
from forge_data._tokenised import Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class Encoder:
    """Turns samples into `TokenizedExample`s with one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        self._offsets = Offsets(tokenizer)
        # By id: is it a special or added token? Runs of blanks are added tokens in some vocabularies (Gemma, GPT-NeoX),
        # and end no turn.
        self._added = np.zeros(self.vocabulary, dtype=np.bool_)
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token_id < self.vocabulary and token.content.replace("\u2581", " ").strip():
                self._added[token_id] = True

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    def encode(self, samples: Sequence[Sample]) -> list[TokenizedExample]:
        """One example a sample, in order; samples of one batch are of one kind.

        Raises:
            DataError, TemplateError, TokenizerError: by the sample's place.
        """
        chats = [sample for sample in samples if isinstance(sample, Chat)]
        texts = [sample for sample in samples if isinstance(sample, Text)]
        tokens = [sample for sample in samples if isinstance(sample, Tokens)]
        examples = [TokenizedExample.from_mask(row.input_ids, row.trained) for row in tokens]
        if chats:
            examples = self._chats(chats)
        elif texts:
            examples = self._texts(texts)
        if len(examples) != len(samples):
            raise TypeError("the samples of a batch must be of one kind")
        return examples

    def _chats(self, chats: list[Chat]) -> list[TokenizedExample]:
        rendered = [self._template.text(chat) for chat in chats]
        spans = [self._template.spans(chat, text) for chat, text in zip(chats, rendered, strict=True)]
        return [
            TokenizedExample.from_mask(ids, trained_tokens(offsets, its_spans, self._added[ids]))
            for (ids, offsets), its_spans in zip(self._tokens(rendered, special=False), spans, strict=True)
        ]

    def _texts(self, texts: list[Text]) -> list[TokenizedExample]:
        eos = self._tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise TokenizerError(
                f"{self._tokenizer.name_or_path or type(self._tokenizer).__name__} has no EOS token, so a completion could "
                "never learn to end; set tokenizer.eos_token"
            )
        joined = self._tokens([text.prompt + text.completion for text in texts], special=True)
        return [_completion(text, ids, offsets, eos) for text, (ids, offsets) in zip(texts, joined, strict=True)]

    def _tokens(self, texts: list[str], *, special: bool) -> list[tuple["NDArray[np.int32]", "NDArray[np.int64]"]]:
        """Ids int32[S] and offsets int64[S, 2] of each text, exactly as the tokenizer gives them."""
        encoded = self._tokenizer(
            texts,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        rows = [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        return [(ids, self._offsets.of(ids, reported)) for ids, reported in zip(rows, encoded["offset_mapping"], strict=True)]


def _completion(text: Text, ids: "NDArray[np.int32]", offsets: "NDArray[np.int64]", eos: int) -> TokenizedExample:
    """Prompt and completion, tokenised as one text so that tokens may merge across the border, and one EOS at the end."""
    start, stop = len(text.prompt), len(text.prompt) + len(text.completion)
    trained = trained_tokens(offsets, [Span.plain(start, stop)], np.zeros(len(ids), dtype=np.bool_))
    # The tokenizer may end the text itself, with a token that stands for no character; or the completion may.
    if len(ids) and ids[-1] == eos and (offsets[-1, 0] == offsets[-1, 1] or offsets[-1, 1] > start):
        trained[-1] = True
        return TokenizedExample.from_mask(ids, trained)
    return TokenizedExample.from_mask(np.append(ids, np.int32(eos)), np.append(trained, np.True_))
