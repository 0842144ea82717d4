"""Samples → examples: rendered, tokenised a batch at a time, masked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forge_data._errors import DataError, TokenizerError
from forge_data._example import IGNORED, TokenizedExample
from forge_data._media import Media
from forge_data._values import MESSAGE_ROLES
from forge_data.chat_template._block import has_reasoning
from forge_data.chat_template._template import Written
from forge_data.chat_template._trace import Run
from forge_data.formats._documents import ended
from forge_data.formats._samples import Chat, Document, Encoded, Note, Pieces, Preference, Sample, Text, Tokens, Unpaired
from forge_data.masking._conversation import Conversation, ConversationReader
from forge_data.masking._frames import Frame
from forge_data.masking._layouts import allows
from forge_data.masking._learned_ends import EVERY, NONE, TURN_END
from forge_data.masking._loss_mask import Span, trained_in_order, trained_tokens
from forge_data.masking._partly import without_masked
from forge_data.masking._segments import segments
from forge_data.masking._train_on import answer_alone, learned_parts, with_stretches
from forge_data.media._load import load_processor
from forge_data.media._processor import ModelProcessor
from forge_data.tokenizing._batch_tokenizer import BatchTokenizer, Tokenised
from forge_data.tokenizing._pieces import joined_pieces
from forge_data.tokenizing._stop_tokens import stop_tokens
from forge_data.tokenizing._token_weights import row_weights, weighed, weights_of, with_weights
from forge_data.tokenizing._with_media import MediaSpans, expanded, written_plain

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_Ids = np.ndarray[Any, np.dtype[np.int32]]
_Offsets = np.ndarray[Any, np.dtype[np.int64]]

Single = Chat | Text | Pieces | Document | Tokens
"""A sample that becomes one example."""


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
    """For plain text, around which the tokenizer adds its special tokens: an EOS from this character on ends it."""
    notes: tuple[Note, ...] = ()
    forms: tuple[str, ...] = ()
    weights: "NDArray[np.float32] | None" = None
    """As `weights_of` returns them."""
    media: MediaSpans | None = None
    masked: tuple[tuple[int, int], ...] = ()
    """Characters of which no token is learned."""


@attrs.frozen
class _Done:
    """An example that is made already, and what was seen in it."""

    example: TokenizedExample
    notes: tuple[Note, ...] = ()


@attrs.frozen
class Pending:
    """Samples whose texts are with the tokenizer."""

    samples: Sequence[Sample]
    counts: list[int]
    """Number of examples that each sample becomes."""
    made: list[_Done | _Job]
    chats: list[_Job]
    texts: list[_Job]
    of_chats: Callable[[], Tokenised]
    """Waits for the tokens of `chats`."""
    of_texts: Callable[[], Tokenised]


class Encoder:
    """Converter of samples to `TokenizedExample`s, with one tokenizer."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        train_on: str = "assistant",
        thread: "Executor | None" = None,
        *,
        turns: str = "auto",
        arguments: Mapping[str, Any] | None = None,
        turn_end: str | None = None,
        train_on_turn_end: str = TURN_END,
    ) -> None:
        self._tokenizer = tokenizer
        self._thread = thread
        self._train_on = train_on
        self._turns = turns
        self._arguments = arguments
        self._turn_end = turn_end
        self._learned_ends = train_on_turn_end
        self.vocabulary = len(tokenizer)
        self._tokenize = BatchTokenizer(tokenizer)
        self._frames: dict[tuple[str, ...], Frame] = {}
        """By the roles of messages that have contents alone."""
        # By id: is it a special or added token? Runs of blanks are added tokens in some vocabularies (Gemma, GPT-NeoX), and
        # end no turn.
        self._added = np.zeros(self.vocabulary, dtype=np.bool_)
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token_id < self.vocabulary and token.content.replace("\u2581", " ").strip():
                self._added[token_id] = True

    @cached_property
    def _conversations(self) -> ConversationReader:
        stops = stop_tokens(self._tokenizer, self._turn_end)
        chosen = self._turn_end is not None
        return ConversationReader(
            self._tokenizer, self._turns, self._arguments, stops, chosen=chosen, learned_ends=self._learned_ends
        )

    @cached_property
    def _processor(self) -> ModelProcessor | TokenizerError:
        """The processor of the tokenizer's directory, once a row has images; or why there is none."""
        try:
            return load_processor(self._tokenizer.name_or_path, self._tokenizer)
        except TokenizerError as error:
            return error

    @cached_property
    def _eos(self) -> int:
        eos = self._tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise TokenizerError(
                f"{self._tokenizer.name_or_path or type(self._tokenizer).__name__} has no EOS token, so a completion could "
                "never learn to end; name one as eos_token in its tokenizer_config.json"
            )
        return eos

    def encode(self, samples: Sequence[Sample]) -> list[Encoded]:
        """Encode samples, in order.

        Raises:
            DataError, TemplateError, TokenizerError: by the sample's place; the first one in order.
        """
        return self.finish(self.begin(samples))

    def encode_known(self, messages: Sequence[Mapping[str, Any]]) -> TokenizedExample | None:
        """Tokenise messages of roles and contents alone, where nothing must be rendered for it.

        It is what `encode` makes; None where that must decide.
        """
        roles, contents = [], []
        for message in messages:
            if type(message) is not dict or len(message) != 2:
                return None
            roles.append(message.get("role"))
            contents.append(message.get("content"))
        if not all(type(text) is str for text in (*roles, *contents)):
            return None
        frame = self._frames.get(tuple(roles))
        if frame is None or not allows(frame.absent, contents):
            return None
        filled = frame.fill(contents)
        try:
            filled.text.encode()
        except UnicodeEncodeError:
            return None
        if (tokens := self._tokenize.one(filled.text)) is None:
            return None
        ids, offsets, sizes = tokens
        labels = np.where(trained_tokens(offsets, filled.spans, self._added[ids]), ids, np.int32(IGNORED))
        ((spans, names),) = segments(offsets[:, 0], sizes, [filled.runs], [roles])
        return TokenizedExample(ids, labels, spans, names)

    def begin(self, samples: Sequence[Sample]) -> Pending:
        """Render samples and start tokenising them, in the encoder's thread if it has one.

        Raises:
            DataError, TemplateError, TokenizerError: as `encode`.
        """
        parts = [_parts(sample) for sample in samples]
        rendered = self._rendered([part for several in parts for part in several])
        made: list[_Done | _Job] = []
        counts: list[int] = []
        for sample, several in zip(samples, parts, strict=True):
            before = len(made)
            if isinstance(sample, Preference | Unpaired) and self._learned_ends == EVERY:
                raise DataError(
                    f"{sample.place}: `train_on_turn_end` is 'all', which learns ends of the prompt too, and of a preference "
                    "or a rated answer the answer alone is learned; use turn, last or none"
                )
            thinks = _thinks(several) if isinstance(sample, Preference) else None
            for part in several:
                made += self._made(part, rendered, thinks)
            counts.append(len(made) - before)
            if isinstance(sample, Preference | Unpaired) and counts[-1] > len(several):
                raise DataError(_several_turns(sample.place))
        jobs = [job for job in made if isinstance(job, _Job)]
        # One call for text, which gets the tokenizer's own special tokens, and one for conversations, which contain theirs.
        chats = [job for job in jobs if job.ends_from is None]
        texts = [job for job in jobs if job.ends_from is not None]
        results = [self._start([job.text for job in some], special=some is texts) for some in (chats, texts)]
        return Pending(samples, counts, made, chats, texts, *results)

    def finish(self, pending: Pending) -> list[Encoded]:
        """Make the examples of samples that `begin` started, in order."""
        of_chats = iter(self._examples(pending.chats, *pending.of_chats()))
        of_texts = iter(self._examples(pending.texts, *self._ended(pending.texts, *pending.of_texts())))
        singles: list[tuple[TokenizedExample, tuple[Note, ...], tuple[str, ...]]] = []
        for job in pending.made:
            if isinstance(job, _Done):
                singles.append((job.example, job.notes, ()))
            else:
                example, notes = next(of_chats if job.ends_from is None else of_texts)
                singles.append((example, (*job.notes, *notes), job.forms))
        encoded, left = [], iter(singles)
        for sample, count in zip(pending.samples, pending.counts, strict=True):
            examples, notes, forms = zip(*[next(left) for _ in range(count)], strict=True)
            desirable = sample.desirable if isinstance(sample, Unpaired) else None
            pair = isinstance(sample, Preference)
            encoded.append(
                Encoded(
                    examples,
                    desirable,
                    tuple(note for some in notes for note in some),
                    sample.margin if isinstance(sample, Preference) else None,
                    pair,
                    frozenset(form for some in forms for form in some),
                )
            )
        return encoded

    def _rendered(self, parts: list[Single]) -> Iterator[Written | None]:
        """Render the conversations among samples, once the first is asked for."""
        yield from self._conversations.render_batch([part for part in parts if isinstance(part, Chat)])

    def _start(self, texts: list[str], *, special: bool) -> Callable[[], Tokenised]:
        # Python's own work gains nothing from a thread.
        if self._thread is None or not texts or (self._tokenize.uses_cache and not special):
            return partial(self._tokenize, texts, special=special)
        return self._thread.submit(self._tokenize, texts, special=special).result

    def _made(self, part: Single, rendered: Iterator[Written | None], thinks: bool | None) -> "list[_Done | _Job]":
        """Make the examples or jobs of one part: of a conversation one, or one a learned turn."""
        match part:
            case Tokens():
                return [_Done(self._tokens(part))]
            case Chat():
                whole = self._train_on == "all"
                what, part = learned_parts(part, self._train_on), with_stretches(part, self._train_on)
                roles = [message["role"] for message in part.messages]
                weights = weights_of(part)
                written, made = next(rendered), list[_Done | _Job]()
                for each, media in self._read(part, what, written, whole=whole, thinks=thinks):
                    job = _Job(each.text, each.spans, each.runs, roles, whole, None, each.notes, each.forms, weights, media)
                    made.append(attrs.evolve(job, masked=each.masked) if each.masked else job)
                plain = not (part.first_completion or part.trains or part.unmask or weights is not None or whole or thinks)
                plain = plain and not part.media and not part.asks and self._learned_ends == TURN_END
                if plain and (frame := self._conversations.frame(part, what)) is not None:
                    self._frames[tuple(roles)] = frame
                return made
            case Pieces():
                return [_Done(self._pieces(part))]
            case Text() if part.media:
                return [self._text_with_media(part)]
            case _:
                return [self._job(part)]

    def _read(
        self, part: Chat, what: Sequence[str], written: Written | None, *, whole: bool, thinks: bool | None
    ) -> list[tuple[Conversation, MediaSpans | None]]:
        """Render a conversation, with what stands for its images."""
        if not part.media:
            return [(each, None) for each in self._conversations.read(part, what, written, whole=whole, thinks=thinks)]
        processor = self._processor_for(part)
        self._conversations.placeholders = processor.placeholders
        read = self._conversations.read(part, what, written, whole=whole, thinks=thinks)
        # The processor tokenises too, perhaps with settings of its own, while the thread does.
        with self._tokenize.lock:
            return [expanded(part, each, processor) for each in read]

    def _processor_for(self, part: Chat | Text) -> ModelProcessor:
        processor = self._processor
        if isinstance(processor, TokenizerError):
            raise TokenizerError(f"{part.place}: {processor}")
        processor.check(part.media, part.place)
        return processor

    def _text_with_media(self, part: Text) -> _Done:
        """Encode plain text with media: the processor's own tokens of it, and EOS behind them."""
        processor = self._processor_for(part)
        if self._train_on == "all" and processor.takes_suffix:
            raise DataError(
                f"{part.place}: `train_on` is all, and this model's prompt sees what is ahead, so that it would learn to "
                "repeat it; use assistant"
            )
        with self._tokenize.lock:
            written, media, notes = written_plain(part, processor)
        texts = [written.prompt, written.completion] if written.apart else [written.prompt + written.completion]
        made = [self._tokenize([text], special=not written.apart) for text in texts]
        offsets = np.concatenate([made[0].offsets, *(each.offsets + len(written.prompt) for each in made[1:])])
        ids = np.concatenate([each.ids for each in made])
        job = self._job(attrs.evolve(part, prompt=written.prompt, completion=written.completion))
        ended = self._ended([job], ids, offsets, [len(ids)])
        # The processor writes no EOS where it is given one text.
        media = attrs.evolve(media, ids=np.append(media.ids, ended.ids[len(ids) :]))
        ((example, _),) = self._examples([attrs.evolve(job, media=media)], *ended)
        return _Done(example, tuple(notes))

    def _job(self, part: Text | Document) -> _Job:
        everything = self._train_on == "all"
        match part:
            case Text():
                self._refuse_roles(part)
                border, end = len(part.prompt), len(part.prompt) + len(part.completion)
                text, runs = part.prompt + part.completion, [(0, border, 0), (border, end, 1)]
                spans, roles = [Span.plain(border, end)], ("prompt", "completion")
                return _Job(text, spans, runs, roles, everything, border, weights=weights_of(part))
            case _:
                if self._train_on not in ("assistant", "all"):
                    raise DataError(
                        f"{part.place}: `train_on` is {self._train_on!r}, and the row is plain text, of which every token is "
                        "learned; use assistant or all"
                    )
                runs, roles = [(0, len(part.text), 0)], ("document",)
                return _Job(part.text, [], runs, roles, whole=True, ends_from=0, weights=weights_of(part))

    def _refuse_roles(self, part: Text | Pieces) -> None:
        if "," in self._train_on or (self._train_on in MESSAGE_ROLES and self._train_on != "assistant"):
            raise DataError(
                f"{part.place}: `train_on` is {self._train_on!r}, and the row is text, of which nobody's role is known; use "
                "assistant, or all to learn the prompt too"
            )

    def _pieces(self, part: Pieces) -> TokenizedExample:
        """Encode texts each alone, with what the tokenizer adds around the whole."""
        self._refuse_roles(part)
        if part.bare and self._train_on not in ("assistant", "all"):
            raise DataError(
                f"{part.place}: `train_on` is {self._train_on!r}, and the row holds segments, whose labels say what is "
                "learned; use assistant, or all to learn every token"
            )
        made = self._tokenize(list(part.texts), special=not part.bare)
        ids, owners = joined_pieces(made, None if part.bare else (self._tokenizer.bos_token_id, self._eos))
        trained = (
            np.array(part.learned, dtype=np.bool_)[owners] if self._train_on != "all" else np.ones(len(ids), dtype=np.bool_)
        )
        if self._learned_ends == NONE and not part.bare and ids[-1] == self._eos:
            trained[-1] = False
        roles = ["completion" if each else "prompt" for each in part.learned]
        runs = [(at, at + 1, at) for at in range(len(roles))]
        ((spans, found),) = segments(owners, [len(ids)], [runs], [roles])
        example = TokenizedExample.from_mask(ids, trained, spans, found)
        return example if part.weight == 1 else with_weights(example, np.full(len(ids), part.weight, dtype=np.float32))

    def _tokens(self, part: Tokens) -> TokenizedExample:
        if self._train_on not in ("assistant", "all"):
            raise DataError(
                f"{part.place}: `train_on` is {self._train_on!r}, and the row holds token ids, whose labels say what is "
                "learned; use assistant, or all to learn every token"
            )
        if part.document:
            part = ended(part, self._eos, self._tokenizer.bos_token_id)
        trained = np.ones_like(part.trained) if self._train_on == "all" else part.trained
        places = np.zeros(len(trained), dtype=np.int64)
        ((every, roles),) = segments(places, [len(trained)], [[(0, 1, 0)]], [("tokens",)])
        return with_weights(TokenizedExample.from_mask(part.input_ids, trained, every, roles), row_weights(part))

    def _examples(
        self, jobs: list[_Job], ids: _Ids, offsets: _Offsets, sizes: list[int]
    ) -> list[tuple[TokenizedExample, list[Note]]]:
        """Make examples of the tokens of texts, one text after the other, with notes of each."""
        if not jobs:
            return []
        bounds = list(pairwise([0, *np.cumsum(sizes).tolist()]))
        trained = self._trained(jobs, ids, offsets, sizes, bounds)
        notes: list[list[Note]] = [[] for _ in jobs]
        for number, (job, (first, last)) in enumerate(zip(jobs, bounds, strict=True)):
            if job.whole:
                trained[first:last] = True
            elif job.ends_from is not None:
                trained[last - 1] = True
            if job.ends_from is not None and self._learned_ends == NONE:
                trained[last - 1] = False
            if job.masked:
                own, learned = offsets[first:last], trained[first:last]
                trained[first:last], notes[number] = without_masked(job.text, job.runs, job.masked, own, learned)
        media: list[tuple[Media, ...]] = [()] * len(jobs)
        for number, (job, (first, last)) in enumerate(zip(jobs, bounds, strict=True)):
            if job.media is not None:
                media[number] = job.media.tokens(ids[first:last], offsets[first:last])
                for medium in media[number]:
                    trained[first + medium.start : first + medium.stop] = False
        labels = np.where(trained, ids, np.int32(IGNORED))
        found = segments(offsets[:, 0], sizes, [job.runs for job in jobs], [job.roles for job in jobs])
        examples = [
            TokenizedExample(ids[first:last], labels[first:last], spans, roles, None, shown)
            for (first, last), (spans, roles), shown in zip(bounds, found, media, strict=True)
        ]
        examples = [
            example if job.weights is None else weighed(example, offsets[first:last, 0], job.runs, job.weights)
            for example, job, (first, last) in zip(examples, jobs, bounds, strict=True)
        ]
        return list(zip(examples, notes, strict=True))

    def _trained(
        self, jobs: list[_Job], ids: _Ids, offsets: _Offsets, sizes: list[int], bounds: list[tuple[int, int]]
    ) -> "NDArray[np.bool_]":
        """Mark the learned tokens of all texts, by their spans: bool[T]."""
        # Special tokens around plain text end no completion; `_ended` handles its EOS.
        added = self._added[ids] if jobs[0].ends_from is None else np.zeros(len(ids), dtype=np.bool_)
        before = np.cumsum([0, *(len(job.text) + 1 for job in jobs)])[:-1]
        places = offsets + np.repeat(before, sizes)[:, None]
        if (places[1:] >= places[:-1]).all():
            spans = [(job.spans, shift, first) for job, shift, (first, _) in zip(jobs, before.tolist(), bounds, strict=True)]
            apart = [Span(*[place + shift for place in span]) for each, shift, _ in spans for span in each]
            return trained_in_order(places, apart, added, [first for each, _, first in spans for _ in each])
        parts = [
            trained_tokens(offsets[first:last], job.spans, added[first:last])
            for job, (first, last) in zip(jobs, bounds, strict=True)
        ]
        return np.concatenate(parts)

    def _ended(self, jobs: list[_Job], ids: _Ids, offsets: _Offsets, sizes: list[int]) -> Tokenised:
        """End plain texts with one EOS each.

        The tokenizer may end a text itself, with a token that stands for no character; or the completion may.
        """
        if not jobs:
            return Tokenised(ids, offsets, sizes)
        ended: list[tuple[_Ids, _Offsets]] = []
        for job, (first, last) in zip(jobs, pairwise([0, *np.cumsum(sizes).tolist()]), strict=True):
            assert job.ends_from is not None
            own, places = ids[first:last], offsets[first:last]
            if not len(own) or own[-1] != self._eos or (places[-1, 0] != places[-1, 1] and places[-1, 1] <= job.ends_from):
                end = places[-1:, 1].repeat(2) if len(own) else np.zeros(2, dtype=np.int64)
                own, places = np.append(own, np.int32(self._eos)), np.concatenate([places, end.reshape(1, 2)])
            ended.append((own, places))
        texts, places = zip(*ended, strict=True)
        return Tokenised(np.concatenate(texts), np.concatenate(places), [len(own) for own in texts])


def _several_turns(place: str) -> str:
    return (
        f"{place}: an answer of several learned turns, which the chat template writes otherwise once others follow, so that "
        "one sample cannot hold them as they will be asked for; set `train_on` to last, or `turns` to history"
    )


def _thinks(answers: Sequence[Single]) -> bool:
    """Tell whether either answer of a preference has reasoning.

    Both are rendered alike, so that they have one prompt.
    """
    return any(
        has_reasoning(message)
        for answer in answers
        if isinstance(answer, Chat)
        for message in answer.messages[answer.first_completion :]
    )


def _answer(side: Chat | Text) -> Chat | Text:
    return answer_alone(side) if isinstance(side, Chat) else side


def _parts(sample: Sample) -> tuple[Single, ...]:
    """List the parts of a sample that become an example each."""
    match sample:
        case Preference():
            return _answer(sample.chosen), _answer(sample.rejected)
        case Unpaired():
            return (_answer(sample.answer),)
        case _:
            return (sample,)
