"""`Question` → the tokens that a model continues from, and those of its images."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_data._errors import DataError, TemplateError, TokenizerError
from forge_data._media import Media
from forge_data.chat_template._template import ChatTemplate
from forge_data.formats._samples import Chat, Text
from forge_data.formats.questions._prompts import Question
from forge_data.masking._conversation import Conversation
from forge_data.masking._media import placeholders
from forge_data.media._load import load_processor
from forge_data.media._processor import ModelProcessor
from forge_data.tokenizing._with_media import expanded, written_plain

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class Asked(NamedTuple):
    """Tokens of a question."""

    ids: "NDArray[np.int32]"
    """int32[S]."""
    media: tuple[Media, ...] = ()
    text: str | None = None
    """With images: what the chat template wrote, with one placeholder for each; None of plain text."""


class PromptEncoder:
    """Tokenises questions with one tokenizer and its chat template.

    `whole`: they are not continued, so texts keep an EOS that the tokenizer writes. `opening`: messages get the template's
    generation prompt, as those that are continued do.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, whole: bool = False, opening: bool | None = None) -> None:
        self._tokenizer, self._whole = tokenizer, whole
        self._opening = not whole if opening is None else opening

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    def encode(self, questions: Sequence[Question]) -> list["NDArray[np.int32]"]:
        """Tokenise questions: int32[S] of each.

        Messages are written by the template with its generation prompt; text gets the tokenizer's own special tokens.

        Raises:
            DataError, TemplateError: by the question's place; the first one in order.
        """
        return [asked.ids for asked in self.encode_with_media(questions)]

    def encode_with_media(self, questions: Sequence[Question]) -> list[Asked]:
        """Tokenise questions, int32[S] of each, and find the tokens of their images.

        Raises:
            DataError, TemplateError: as `encode`, and as of samples with images.
            TokenizerError: the model has no processor of images, or not one whose text is known.
        """
        written: list[str] = []
        pictured: list[Asked] = []
        for each in questions:
            if isinstance(each.prompt, Chat) and each.prompt.media:
                pictured.append(self._pictured(each.prompt))
            elif isinstance(each.prompt, Chat):
                written.append(self._template.prompt(each.prompt, opening=self._opening))
                self._check_system(each.prompt, written[-1])
            elif isinstance(each.prompt, Text):
                pictured.append(self._plain(each.prompt))
        texts = [each.prompt for each in questions if isinstance(each.prompt, str)]
        # One call for text, which gets the tokenizer's own special tokens, and one for conversations, which contain theirs.
        chats, plain = iter(self._ids(written, special=False)), iter(self._ids(texts, special=True))
        with_media = iter(pictured)
        return [
            next(with_media)
            if isinstance(each.prompt, Text) or (isinstance(each.prompt, Chat) and each.prompt.media)
            else Asked(next(chats if isinstance(each.prompt, Chat) else plain))
            for each in questions
        ]

    def _check_system(self, chat: Chat, text: str) -> None:
        """Refuse a template that leaves out a system message which the row did not ask for."""
        if chat.system_added and str(chat.messages[0]["content"]).strip() not in text:
            raise TemplateError(
                f"{chat.place}: {self._template.name} does not write the system message of `system_prompt`; use a template "
                "that writes one, or leave it out"
            )

    @cached_property
    def _processor(self) -> ModelProcessor:
        return load_processor(self._tokenizer.name_or_path, self._tokenizer)

    def _processor_for(self, part: Chat | Text) -> ModelProcessor:
        try:
            processor = self._processor
        except TokenizerError as error:
            raise TokenizerError(f"{part.place}: {error}") from error
        processor.check(part.media, part.place)
        return processor

    def _plain(self, text: Text) -> Asked:
        """Tokenise plain text with images as the model's processor does, without an EOS behind it."""
        processor = self._processor_for(text)
        written, spans, _ = written_plain(text, processor)
        encoded = self._tokenizer(
            written.prompt, add_special_tokens=not written.apart, return_offsets_mapping=True, verbose=False
        )
        ids, places = np.array(encoded["input_ids"], dtype=np.int32), encoded["offset_mapping"]
        media = spans.tokens(ids, np.array(places, dtype=np.int64))
        return Asked(self._without_eos(ids.tolist(), places), media)

    def _pictured(self, chat: Chat) -> Asked:
        """Tokenise messages with images as the model's processor does."""
        processor = self._processor_for(chat)
        rendered = self._template.rendered_prompt(chat, opening=self._opening)
        self._check_system(chat, rendered.trace.text)
        number = placeholders(rendered, processor.placeholders, chat.place, self._template.name)
        plain = Conversation(text=rendered.trace.text, spans=[], runs=[], notes=(), media=number)
        made, spans = expanded(chat, plain, processor)
        assert spans is not None
        encoded = self._tokenizer(made.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        return Asked(ids, spans.tokens(ids, np.array(encoded["offset_mapping"], dtype=np.int64)), plain.text)

    def encode_texts(self, questions: Sequence[Question], limit: int | None = None) -> list[list[Asked]]:
        """Tokenise questions of several texts.

        A string gets the tokenizer's own special tokens; one of more than `limit` tokens is cut before the last of those.
        Messages are written by the template, and are not cut.

        Raises:
            DataError, TemplateError, TokenizerError: as `encode_with_media`; or a string beside media has a token of one.
        """
        groups = [each.prompt for each in questions if isinstance(each.prompt, tuple)]
        chats = [Question(text, b"") for group in groups for text in group if isinstance(text, Chat)]
        texts = [text for group in groups for text in group if isinstance(text, str)]
        written, plain = iter(self.encode_with_media(chats)), iter(self._strings(texts, limit) if texts else ())
        made = [[next(plain if isinstance(text, str) else written) for text in group] for group in groups]
        for group, found in zip(groups, made, strict=True):
            if (pictured := next((text for text in group if isinstance(text, Chat) and text.media), None)) is not None:
                self._check_strings(pictured.place, found)
        return made

    def _check_strings(self, place: str, texts: Sequence[Asked]) -> None:
        """Refuse texts without media, beside one with some, that have a token of media."""
        token_ids = self._processor.token_ids | self._processor.other_token_ids
        for asked in texts:
            if not asked.media and (of_media := token_ids & {*asked.ids.tolist()}):
                raise DataError(
                    f"{place}: a text of the row has {self._processor.text_of(min(of_media))!r} in it, which stands "
                    "for a part of a medium of this model; take it out of the text"
                )

    def _strings(self, texts: list[str], limit: int | None) -> list[Asked]:
        """Tokenise strings, each a text of its own."""
        cut = {} if limit is None else {"truncation": True, "max_length": limit}
        encoded = self._tokenizer(
            texts, return_attention_mask=False, return_token_type_ids=False, verbose=limit is not None, **cut
        )
        if cut:
            # Or whoever saves the tokenizer would save it with this limit.
            self._tokenizer.backend_tokenizer.no_truncation()
        return [Asked(np.array(ids, dtype=np.int32)) for ids in encoded["input_ids"]]

    def _ids(self, texts: list[str], *, special: bool) -> list["NDArray[np.int32]"]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            add_special_tokens=special,
            return_offsets_mapping=special and not self._whole,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        places = encoded["offset_mapping"] if special and not self._whole else [None] * len(texts)
        return [self._without_eos(ids, at) for ids, at in zip(encoded["input_ids"], places, strict=True)]

    def _without_eos(self, ids: list[int], places: Any) -> "NDArray[np.int32]":
        """Drop the EOS that some tokenizers write after every text, since a prompt continues."""
        stop = len(ids)
        while (
            places is not None
            and stop
            and ids[stop - 1] == self._tokenizer.eos_token_id
            and stop > self._count_to_last_text(places)
        ):
            stop -= 1
        return np.array(ids[:stop], dtype=np.int32)

    @staticmethod
    def _count_to_last_text(places: list[tuple[int, int]]) -> int:
        """Count the tokens up to the last that stands for characters; a BOS alone is one."""
        return next((at + 1 for at in reversed(range(len(places))) if places[at][0] != places[at][1]), 1)
