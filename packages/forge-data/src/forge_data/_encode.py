"""Samples to ids and labels: rendered, tokenised a batch at a time, masked."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import attrs
import numpy as np

from forge_data._conversation import Conversation, Conversations
from forge_data._errors import DataError, TokenizerError
from forge_data._example import TokenizedExample
from forge_data._learn import learned
from forge_data._mask import Span, trained_tokens
from forge_data._offsets import Offsets
from forge_data._sample_types import Chat, Document, Encoded, Note, Preference, Sample, Text, Tokens, Unpaired
from forge_data._segments import segments
from forge_data._trace_render import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

Single = Chat | Text | Document | Tokens
"""What becomes one example."""


@attrs.frozen
class _Job:
    """A text that waits for the tokenizer."""

    text: str
    spans: list[Span]
    runs: list[Run]
    roles: Sequence[str]
    whole: bool
    """Whether every token is learned."""
    ends_from: int | None = None
    """For plain text, which the tokenizer begins and ends as it does text: an EOS from this character on ends it."""
    notes: tuple[Note, ...] = ()


class Encoder:
    """Turns samples into `TokenizedExample`s with one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", train_on: str = "assistant") -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        self.vocabulary = len(tokenizer)
        self._offsets = Offsets(tokenizer)
        # By id: is it a special or added token? Runs of blanks are added tokens in some vocabularies (Gemma, GPT-NeoX),
        # and end no turn.
        self._added = np.zeros(self.vocabulary, dtype=np.bool_)
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token_id < self.vocabulary and token.content.replace("\u2581", " ").strip():
                self._added[token_id] = True

    @cached_property
    def _conversations(self) -> Conversations:
        return Conversations(self._tokenizer)

    @cached_property
    def _eos(self) -> int:
        eos = self._tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise TokenizerError(
                f"{self._tokenizer.name_or_path or type(self._tokenizer).__name__} has no EOS token, so a completion could "
                "never learn to end; set tokenizer.eos_token"
            )
        return eos

    def encode(self, samples: Sequence[Sample]) -> list[Encoded]:
        """What each sample becomes, in order.

        Raises:
            DataError, TemplateError, TokenizerError: by the sample's place; the first one in order.
        """
        parts = [_parts(sample) for sample in samples]
        singles = iter(self._encode([part for several in parts for part in several]))
        encoded = []
        for sample, several in zip(samples, parts, strict=True):
            examples, notes = zip(*[next(singles) for _ in several], strict=True)
            desirable = sample.desirable if isinstance(sample, Unpaired) else None
            encoded.append(Encoded(examples, desirable, tuple(note for some in notes for note in some)))
        return encoded

    def _encode(self, parts: list[Single]) -> list[tuple[TokenizedExample, tuple[Note, ...]]]:
        made = [self._tokens(part) if isinstance(part, Tokens) else self._job(part) for part in parts]
        jobs = [job for job in made if isinstance(job, _Job)]
        # One call for text, which gets the tokenizer's own special tokens, and one for conversations, which have theirs.
        chats = iter(self._ids([job.text for job in jobs if job.ends_from is None], special=False))
        texts = iter(self._ids([job.text for job in jobs if job.ends_from is not None], special=True))
        encoded: list[tuple[TokenizedExample, tuple[Note, ...]]] = []
        for job in made:
            if isinstance(job, TokenizedExample):
                encoded.append((job, ()))
            elif job.ends_from is None:
                encoded.append((self._example(job, *next(chats)), job.notes))
            else:
                encoded.append((self._example(job, *self._ended(job.ends_from, *next(texts))), job.notes))
        return encoded

    def _job(self, part: Chat | Text | Document) -> _Job:
        everything = self._train_on == "all"
        match part:
            case Chat():
                read: Conversation = self._conversations.read(part, learned(part, self._train_on))
                roles = [message["role"] for message in part.messages]
                return _Job(read.text, read.spans, read.runs, roles, everything, notes=read.notes)
            case Text():
                border, end = len(part.prompt), len(part.prompt) + len(part.completion)
                text, runs = part.prompt + part.completion, [(0, border, 0), (border, end, 1)]
                return _Job(text, [Span.plain(border, end)], runs, ("prompt", "completion"), everything, border)
            case _:
                if self._train_on not in ("assistant", "all"):
                    raise DataError(
                        f"{part.place}: train_on is {self._train_on!r}, and the row is plain text, of which every token is "
                        "learned; use train_on 'assistant' or 'all'"
                    )
                return _Job(part.text, [], [(0, len(part.text), 0)], ("document",), whole=True, ends_from=0)

    def _tokens(self, part: Tokens) -> TokenizedExample:
        if self._train_on not in ("assistant", "all"):
            raise DataError(
                f"{part.place}: train_on is {self._train_on!r}, and the row came as tokens, whose labels say what is learned; use "
                "train_on 'assistant', or 'all' to learn every token"
            )
        trained = np.ones_like(part.trained) if self._train_on == "all" else part.trained
        every, roles = segments(np.zeros((len(trained), 2), dtype=np.int64), [(0, 1, 0)], ("tokens",))
        return TokenizedExample.from_mask(part.input_ids, trained, every, roles)

    def _example(self, job: _Job, ids: "NDArray[np.int32]", offsets: "NDArray[np.int64]") -> TokenizedExample:
        if job.whole:
            trained = np.ones(len(ids), dtype=np.bool_)
        elif job.ends_from is None:
            trained = trained_tokens(offsets, job.spans, self._added[ids])
        else:
            trained = trained_tokens(offsets, job.spans, np.zeros(len(ids), dtype=np.bool_))
            trained[-1] = True
        return TokenizedExample.from_mask(ids, trained, *segments(offsets, job.runs, job.roles))

    def _ended(
        self, ends_from: int, ids: "NDArray[np.int32]", offsets: "NDArray[np.int64]"
    ) -> tuple["NDArray[np.int32]", "NDArray[np.int64]"]:
        """Plain text with one EOS at its end.

        The tokenizer may end the text itself, with a token that stands for no character; or the completion may.
        """
        if len(ids) and ids[-1] == self._eos and (offsets[-1, 0] == offsets[-1, 1] or offsets[-1, 1] > ends_from):
            return ids, offsets
        end = offsets[-1:, 1].repeat(2) if len(ids) else np.zeros(2, dtype=np.int64)
        return np.append(ids, np.int32(self._eos)), np.concatenate([offsets, end.reshape(1, 2)])

    def _ids(self, texts: list[str], *, special: bool) -> list[tuple["NDArray[np.int32]", "NDArray[np.int64]"]]:
        """Ids int32[S] and offsets int64[S, 2] of each text, exactly as the tokenizer gives them."""
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        # All rows in one array: what is done to each token alone is done to all of them at once.
        sizes = np.array([len(ids) for ids in encoded["input_ids"]])
        ids = np.fromiter(chain.from_iterable(encoded["input_ids"]), dtype=np.int32, count=int(sizes.sum()))
        offsets = self._offsets.of(ids, encoded["offset_mapping"])
        bounds = pairwise([0, *np.cumsum(sizes).tolist()])
        return [(ids[start:stop], offsets[start:stop]) for start, stop in bounds]


def _parts(sample: Sample) -> tuple[Single, ...]:
    """What of a sample becomes an example of its own."""
    match sample:
        case Preference():
            return sample.chosen, sample.rejected
        case Unpaired():
            return (sample.answer,)
        case _:
            return (sample,)
