"""Example with images, videos or audio → the arguments of a forward beside its tokens."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from forge_data._errors import DataError
from forge_data._example import IGNORED
from forge_data._media import MANY, ONE, Kind, Media
from forge_data._values import counted
from forge_data.media._load import load_processor
from forge_data.media._processor import PREFIX, Joining, ModelProcessor
from forge_data.media._read import close, uri_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


class _Pictured(Protocol):
    """A `TokenizedExample`, or a `Prompt`."""

    @property
    def input_ids(self) -> "NDArray[np.int32]": ...

    @property
    def media(self) -> tuple[Media, ...]: ...


class _Asked(_Pictured, Protocol):
    """A `Prompt`."""

    @property
    def text(self) -> str | None: ...


class Unexpanded(NamedTuple):
    """A prompt as a server of its model is given it, whose own processor expands it."""

    input_ids: "NDArray[np.int32]"
    """int32[S], with the processor's placeholder in the place of what stands for each medium."""
    media: list[str]
    """Each as a `data:` URI.

    An image is a PNG, upright and in RGB, audio a WAV of the samples that the processor is given, a video its file, and a list
    of frames `data:video/jpeg;base64,` with a PNG for each and commas between them, as vLLM reads it.
    """
    expanded: int
    """Tokens of the prompt, with those that stand for media."""


class MediaInputs:
    """Makes what a forward is given for an example beside `input_ids`: pixels, spectrograms, ...

    `inputs(example)` is what the model's own processor makes, `processor(text=[text], images=[images], videos=videos,
    audio=audio, return_tensors="np")`, without `input_ids` and `attention_mask`, whatever its arrays are called:

    - `pixel_values` and the like in the processor's dtype (float32 as a rule, and for bfloat16) and shape, such as [I, 3, H, W]
      of I images;
    - `pixel_values_videos` and the like of the frames that it chooses, and what it makes of their times (`second_per_grid_ts`);
    - `image_grid_thw`, `image_sizes` and the like;
    - `input_features` and the like of audio, with the mask of what is padded;
    - `mm_token_type_ids` or `token_type_ids`, int64[1, S], where the processor makes them: 1 for a token that stands for an
      image, 2 for one of a video. An example without images has these alone, all 0, as the processor makes them for a text.

    Media are read again from their files, or from the bytes in the store, and must be those that were prepared. Several
    threads may call one; media are decoded at the same time, and processed one after the other.
    """

    def __init__(
        self,
        directory_or_processor: "str | os.PathLike[str] | ProcessorMixin",
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        """Load the processor of a model.

        Args:
            directory_or_processor: directory of the model, its name on the Hub, or its loaded processor.
            tokenizer: the tokenizer in use, in place of the processor's own.

        Raises:
            TokenizerError: no processor there, one that needs a package that is not installed (torchvision, Pillow), or one
                that does not say what it writes for an image.
        """
        given = directory_or_processor
        self._processor = (
            load_processor(given, tokenizer) if isinstance(given, (str, os.PathLike)) else ModelProcessor(given, tokenizer)
        )
        self._lock = Lock()

    def using(self, tokenizer: "PreTrainedTokenizerBase") -> "MediaInputs":
        """Put a tokenizer in use, in place of the one that was, and return this."""
        self._processor.use(tokenizer)
        return self

    @property
    def joins(self) -> bool:
        """Whether the media of several texts are given to a model in one array, as `join` makes it."""
        return self.joins_of(self._processor.placeholders)

    def joins_of(self, kinds: "Iterable[Kind]") -> bool:
        """Tell whether those of some kinds are."""
        return {*kinds} <= self._joining.keys()

    @property
    def pads(self) -> bool:
        """Whether the processor pads the arrays of images to the largest of a batch, as `join` does."""
        return any(any(each.slack) for found in self._joining.values() for each in found.values())

    @cached_property
    def _joining(self) -> "dict[Kind, dict[str, Joining]]":
        with self._lock:
            return self._processor.joining()

    def join(self, examples: "Sequence[Mapping[str, NDArray[Any]]]", *, more: bool = False) -> "list[dict[str, NDArray[Any]]]":
        """Make the arrays of examples that share a forward alike in all dimensions but the first.

        The processor does so with a batch: it pads images to the largest (Pixtral), their pieces to the most (LLaVA-NeXT) or
        the images of a text to the most (Idefics 3). What is made of one text is as large as its own images need. Where it
        joins them along another dimension (MiniCPM-V), the first example has all.

        Args:
            examples: what a call made of each.
            more: pad beyond the largest, by as much as unlike images may differ: for tests of a model.
        """
        found = [dict(each) for each in examples]
        for name, how in (each for kind in self._joining.values() for each in kind.items()):
            owners = [each for each in found if name in each]
            shapes = [each[name].shape for each in owners]
            beyond = how.slack if more else (0,) * len(how.slack)
            sizes = [max(each) + extra for *each, extra in zip(*shapes, beyond, strict=True)] if shapes else []
            for each in owners:
                each[name] = how.padded(each[name], sizes)
            if how.axis and owners:
                owners[0][name] = np.concatenate([owners[0][name], *(each.pop(name) for each in owners[1:])], how.axis)
        return found

    @property
    def placeholders(self) -> tuple[str, ...]:
        """What a chat template writes for a medium, of each kind that the processor takes."""
        return tuple(self._processor.placeholders.values())

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of media that the processor takes: image, video, audio."""
        return tuple(self._processor.placeholders)

    @property
    def marks(self) -> tuple[tuple[str, int], ...]:
        """Arrays of tokens, and their number of a text without media, where that is not 0."""
        return ((PREFIX, 1),) if self._processor.takes_suffix else ()

    @property
    def token_ids(self) -> frozenset[int]:
        """Tokens that the model takes for parts of an image, a video or a sound; no answer has one."""
        return self._processor.token_ids | self._processor.other_token_ids

    def __call__(self, example: "_Pictured", place: str = "an example") -> "dict[str, NDArray[Any]]":
        """Make the arguments of a forward of one example or prompt, a batch of one.

        Args:
            example: of a store, or of `tokenize`.
            place: of its row, for errors, as `store.source(index)` returns it.

        Raises:
            DataError: a file of an image is missing, or is not the one that was prepared; or the processor makes another number
                of tokens of the images than the example has.
        """
        decoded = [self._processor.read(medium, place)[0] for medium in example.media]
        try:
            with self._lock:
                of_media = self._processor.arrays(decoded, place, example.input_ids) if decoded else {}
                return of_media | self._processor.of_tokens(example.input_ids, _prompt_of(example))
        finally:
            close(decoded)

    def unexpanded(self, prompt: _Asked, place: str = "a prompt") -> Unexpanded:
        """Return a prompt with placeholders for its media, and these as a server reads them.

        The model's processor makes the prompt's own tokens of it, in a server too.

        Raises:
            DataError: as of a call; or the prompt is plain text, or of a version that kept no text.
        """
        if prompt.text is None:
            raise DataError(f"{place}: the store has no text of a prompt with media; prepare the rows again, as messages")
        media = [uri_of(medium, place, self._processor.sampling_rate) for medium in prompt.media]
        return Unexpanded(self._processor.ids_of(prompt.text), media, len(prompt.input_ids))

    def spans(self, input_ids: "NDArray[Any]") -> list[tuple[int, int]]:
        """Return [start, stop) of each run of tokens int[S] that stand for parts of media."""
        inside = np.isin(input_ids, [*self._processor.token_ids])
        edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
        return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]

    def prompt(
        self, text: str, media: Sequence[Media], place: str = "the prompt", *, places: Sequence[int] | None = None
    ) -> "dict[str, NDArray[Any]]":
        """Make the arguments of a forward of a text that a chat template wrote, or of plain text.

        They are `input_ids` int64[1, S], and those of a call.

        Args:
            text: with the processor's placeholder for each medium; of plain text without.
            media: in the order of the placeholders.
            place: of the text, for errors.
            places: of plain text, which no chat template wrote, the character before which each medium stands. The tokenizer's
                special tokens are added.

        Raises:
            DataError: another number of placeholders than of media, a token of one in the text, or one that cannot be read.
            TokenizerError: a medium of a kind that the model does not take.
        """
        self._processor.check(media, place)
        if places is not None:
            return self._plain_prompt(text, media, place, places)
        for kind, placeholder in self._processor.placeholders.items():
            given = sum(medium.kind == kind for medium in media)
            if (found := text.count(placeholder)) != given:
                raise DataError(
                    f"{place}: the chat template writes {found} of {placeholder!r}, the placeholder of {ONE[kind]}, for "
                    f"{counted(given, MANY[kind])}; take it out of the text, or use the template of the model's processor"
                )
        decoded = [self._processor.read(medium, place)[0] for medium in media]
        try:
            with self._lock:
                replacements, ids = self._processor.expand(text, decoded, place)
                for medium, each in zip(media, replacements, strict=True):
                    if not self._processor.count(self._processor.ids_of(each.text)):
                        raise DataError(
                            f"{place}: field {medium.field}: {self._processor.name} makes no token of this {medium.kind}, "
                            "which is too short or too small for it; take another"
                        )
                return (
                    {"input_ids": ids[None].astype(np.int64)}
                    | self._processor.arrays(decoded, place, ids, text)
                    | self._processor.of_tokens(ids)
                )
        finally:
            close(decoded)

    def _plain_prompt(self, text: str, media: Sequence[Media], place: str, places: Sequence[int]) -> "dict[str, NDArray[Any]]":
        decoded = [self._processor.read(medium, place)[0] for medium in media]
        try:
            with self._lock:
                ids = self._processor.plain(text, places, "", decoded, place).ids
                arrays = self._processor.arrays(decoded, place, ids, text)
                return {"input_ids": ids[None].astype(np.int64)} | arrays | self._processor.of_tokens(ids)
        finally:
            close(decoded)


def _prompt_of(example: _Pictured) -> int | None:
    """Count the tokens before what is learned; 0 of a text without media, None of a prompt."""
    labels = getattr(example, "labels", None)
    if labels is None:
        return None
    learned = np.flatnonzero(labels != IGNORED)
    return (int(learned[0]) if len(learned) else None) if example.media else 0
