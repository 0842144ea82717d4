"""Processor of a model → what stands for an image, a video or audio, and its arrays.

The processor is that of transformers, so what a model is trained on is what it gets from plain transformers.
"""

import inspect
import re
from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forge_data._errors import DataError, TokenizerError
from forge_data._media import ONE, Kind, Media, several
from forge_data.media._expanded import Expanded, PlainText, Recorder, Replacement
from forge_data.media._joining import Joining, alike, fitting, joining, made_up_images, made_up_media
from forge_data.media._plain import write_plain
from forge_data.media._read import read_audio, read_image
from forge_data.media._video import Chosen, Sample, Video, kind_of, read_video

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image as Pixels
    from transformers import PreTrainedTokenizerBase

    Decoded = Pixels | Video | NDArray[np.float32]
    """An image, a video, or samples of audio."""

_NO_ARRAYS = ("input_ids", "attention_mask", "text_replacement_offsets", "labels", "video_metadata")
_BFLOAT16 = "bfloat16"
PREFIX = "token_type_ids"
"""Of a processor that takes a suffix: 1 for its tokens, 0 for those before it."""
_OF_TOKENS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""Arrays with a number for each token that processors make of the ids."""

_HEARD = 30
"""Seconds that every processor hears, unless it says how many."""
_END = 0.05
"""Seconds at the end of a clip by which is told whether they are heard."""


def _array(values: Any) -> "NDArray[Any]":
    """Return an array of a processor; numbers of Python are as PyTorch has them."""
    made = np.asarray(values)
    return made.astype(np.float32) if made.dtype == np.float64 and made.ndim == 1 else made


class ModelProcessor:
    """The processor of a model, with the tokenizer in use."""

    def __init__(self, processor: Any, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        """Check a processor.

        Raises:
            TokenizerError: it takes no media, or does not say what it writes for one.
        """
        self.name = f"the processor {type(processor).__name__}"
        ears = getattr(processor, "audio_processor", None) or getattr(processor, "feature_extractor", None)
        self.sampling_rate = int(getattr(ears, "sampling_rate", 0) or 0)
        """Of audio that it is given, in Hz; 0 where it takes none."""
        self._heard: int | None = getattr(ears, "n_samples", None)
        takes: dict[Kind, bool] = {
            "image": hasattr(processor, "image_processor"),
            "video": getattr(processor, "video_processor", None) is not None,
            "audio": self.sampling_rate > 0,
        }
        if not any(takes.values()) or getattr(processor, "tokenizer", None) is None:
            raise TokenizerError(
                f"there are media, and what reads for the model ({type(processor).__name__}) does not take them beside text; "
                "use a model that takes them, or leave them out"
            )
        arguments = inspect.signature(type(processor).__call__).parameters
        if takes["audio"] and "text" in arguments and "audio" not in arguments:
            raise TokenizerError(
                f"{self.name} takes audio in conversations alone (Voxtral), which mistral-common writes and tokenizes without "
                "saying which characters a token stands for, so that answers could not be told from prompts; take another model"
            )
        self._processor = processor
        self.takes_suffix = "suffix" in arguments
        """Whether it is given a completion by itself, and all before that sees what is ahead (PaliGemma)."""
        self._recording = Lock()
        if tokenizer is not None:
            self.use(tokenizer)
        named: dict[Kind, Any] = {kind: getattr(processor, f"{kind}_token", None) for kind, has in takes.items() if has}
        self.placeholders: dict[Kind, str] = {kind: text for kind, text in named.items() if isinstance(text, str) and text}
        """Kind of media that it takes → text with which a chat template stands for one."""
        if not self.placeholders or not hasattr(processor, "get_text_with_replacements"):
            raise self._legacy()
        ids = {kind: self._ids(kind) for kind in takes}
        self.token_ids = frozenset[int]().union(*(ids[kind] for kind in self.placeholders))
        """Tokens that a model takes for parts of media."""
        others = frozenset(each for each in getattr(processor, "video_token_ids", None) or () if isinstance(each, int))
        self.other_token_ids = others.union(*ids.values()) - self.token_ids
        """Tokens that it takes for parts of media that are not given to it."""

    @property
    def _what(self) -> str:
        return " or ".join(ONE[kind] for kind in self.placeholders) or "an image"

    def _ids(self, kind: Kind) -> frozenset[int]:
        found = frozenset(each for each in getattr(self._processor, f"{kind}_token_ids", None) or () if isinstance(each, int))
        # `audio_token_ids` may have the marks around a clip too, which templates write (Qwen3-ASR).
        if kind in self.placeholders and (not found or kind == "audio"):
            tokenizer = self._processor.tokenizer
            own = tokenizer.convert_tokens_to_ids(self.placeholders[kind])
            # A placeholder may be no token: SmolVLM writes images in the place of a video.
            return frozenset() if own in (None, tokenizer.unk_token_id) else frozenset({int(own)})
        return found

    def check(self, media: Sequence[Media], place: str) -> None:
        """Refuse media of a kind that the model does not take.

        Raises:
            TokenizerError: naming one.
        """
        if other := next((each for each in media if each.kind not in self.placeholders), None):
            raise TokenizerError(
                f"{place}: field {other.field} is {ONE[other.kind]}, and {self.name} takes "
                f"{several(self.placeholders)}; use a model that takes it, or leave it out"
            )

    def read(self, medium: Media, place: str, lost: list[str] | None = None) -> "tuple[Decoded, Media]":
        """Decode a medium for the processor, and say by SHA-256 what was read.

        Args:
            medium: of a kind that it takes.
            place: of its row.
            lost: gets what of it the model does not see or hear.

        Raises:
            DataError: as `read_image`, `read_video` and `read_audio`.
        """
        if medium.kind == "video":
            if medium.frames and medium.fps is None and lost is not None and self._reads_times:
                lost.append("it has no sample_fps, and the processor assumes one")
            return read_video(medium, place, None if medium.frames else self._sample)
        if medium.kind == "image":
            pixels, sha256 = read_image(medium, place, lost)
            return pixels, attrs.evolve(medium, sha256=sha256)
        samples, sha256 = read_audio(medium, place, self.sampling_rate)
        if lost is not None and not self._hears_all(samples):
            seconds = len(samples) / self.sampling_rate
            lost.append(f"it has {seconds:.1f} s, and its end is not heard: the processor has a limit (30 s of most)")
        return samples, attrs.evolve(medium, sha256=sha256)

    @cached_property
    def _sample(self) -> Sample | None:
        """How the processor chooses frames of a file that a conversation names; None: it takes all.

        Raises:
            TokenizerError: it does not read files as transformers' processors do.
        """

        def fetch_videos(_: Any, sample_indices_fn: Sample | None = None) -> Any:
            raise Chosen(sample_indices_fn)

        processor = self._processor.video_processor
        asked = [{"role": "user", "content": [{"type": "video", "video": "video.mp4"}]}]
        with self._recording:
            processor.fetch_videos = fetch_videos
            try:
                # The text is the placeholder alone, whatever the messages.
                self._processor.apply_chat_template(asked, self.placeholders["video"], tokenize=True, return_dict=True)
            except Chosen as chosen:
                return chosen.sample
            except Exception as error:
                raise self._legacy(why=f" ({error})") from error
            finally:
                del processor.fetch_videos
        raise self._legacy()

    @cached_property
    def _reads_times(self) -> bool:
        """Whether it makes something else of frames that were taken in other seconds."""
        (video, *_), found = made_up_media("video", 0), list[Any]()
        for rate in (1.0, 30.0):
            try:
                found.append(self._arrays_of_media("", [[video._replace(about={**video.about, "fps": rate})]]))
            except DataError:
                return False
        return any(not np.array_equal(np.asarray(array), np.asarray(found[1][name])) for name, array in found[0].items())

    def _hears_all(self, samples: "NDArray[np.float32]") -> bool:
        """Tell whether other samples at the end of a clip are other arrays."""
        end = int(_END * self.sampling_rate)
        if len(samples) <= (self._heard or _HEARD * self.sampling_rate):
            return True
        other = samples.copy()
        other[-end:] = np.random.default_rng(0).uniform(-0.5, 0.5, end)
        found = [self.arrays([each], "") for each in (samples, other)]
        return any(not np.array_equal(found[0][name], array) for name, array in found[1].items())

    def use(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Tokenize with `tokenizer` from now on."""
        self._processor.tokenizer = tokenizer

    def text_of(self, token_id: int) -> str:
        """Return the text of a token, such as `<|image_pad|>`."""
        return str(self._processor.tokenizer.convert_ids_to_tokens(token_id))

    def ids_of(self, text: str) -> "NDArray[np.int32]":
        """Tokenize a text as it is, without images and without special tokens: int32[S]."""
        encoded = self._processor.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return np.array(encoded["input_ids"], dtype=np.int32)

    def expand(self, text: str, media: "Sequence[Decoded]", place: str, **options: Any) -> Expanded:
        """Find what stands for each medium of a text, whose placeholders a chat template wrote.

        `options` go to the processor.

        Raises:
            DataError: the processor refuses text or media; its own message is included.
            TokenizerError: it does not say what it writes for one, or makes arrays of the text that cannot be made again.
        """
        if self.takes_suffix:
            raise TokenizerError(
                f"{place}: {self.name} is given prompt and completion apart, and no conversation; make them the row's columns "
                "prompt and completion, both text, with its images in the column images"
            )
        made = self._arrays(place, [text], [media], return_text_replacement_offsets=True, **options)
        offsets = made.get("text_replacement_offsets")
        kinds = [kind_of(each) for each in media]
        if not offsets and all(kind == "image" for kind in kinds):
            replacements = self._aligned(place, text, media)
        elif not offsets or [each["type"] for each in offsets[0]] != kinds:
            raise self._legacy(f"{place}: ")
        else:
            replacements = [Replacement(each["span"][0], each["span"][1], each["replacement"]) for each in offsets[0]]
        ids = np.asarray(made["input_ids"][0], dtype=np.int32)
        if "audio" in kinds and not all(np.isfinite(np.asarray(made[name])).all() for name in made.keys() - {*_NO_ARRAYS}):
            raise DataError(f"{place}: {self.name} makes infinite numbers of the row's audio, which is too loud; mend it")
        self._check_arrays(place, made, ids, media)
        return Expanded(replacements, ids)

    def plain(self, prompt: str, places: Sequence[int], completion: str, media: "Sequence[Decoded]", place: str) -> PlainText:
        """Find what it writes for plain text with media, and tokens; errors as of `expand`.

        Args:
            prompt: without placeholders.
            places: character of it before which each medium stands.
            completion: "" for a prompt that is asked.
            media: decoded.
            place: of the row.
        """
        return write_plain(self, prompt, places, completion, media, place)

    def _aligned(self, place: str, text: str, media: "Sequence[Decoded]") -> list[Replacement]:
        """Find what an older processor writes for each image, in the text that it has tokenized.

        That is what it writes for the image alone, or its placeholder, and the rest of the text is as it was. Neighbours may
        share a mark between them, and a blank may stand behind it (Idefics 2).

        Raises:
            TokenizerError: it wrote something else.
        """
        around = [match.span() for match in re.finditer(re.escape(self.placeholders["image"]), text)]
        if len(around) != len(media):
            raise self._legacy(f"{place}: ")
        known: list[str] = [*self._processor.tokenizer.get_added_vocab()]
        marks = "|".join(re.escape(each) for each in sorted(known, key=len, reverse=True))
        pattern, at = [], 0
        for (start, stop), medium in zip(around, media, strict=True):
            alone = self._written(place, self.placeholders["image"], [medium])
            mark = re.match(marks, alone)
            size = mark.end() if mark and self.placeholders["image"] in alone[mark.end() :] else 0
            own = f"(?:{re.escape(alone[:size])})?{re.escape(alone[size:])} ?"
            pattern += [re.escape(text[at:start]), f"({own}|{re.escape(self.placeholders['image'])})"]
            at = stop
        found = re.fullmatch("".join([*pattern, re.escape(text[at:])]), self._written(place, text, media))
        if found is None:
            raise TokenizerError(
                f"{place}: {self.name} does not say what it writes in place of an image, and changes more of the row's text "
                "than that; use the chat template of this processor, which writes what the processor would add (such as BOS)"
            )
        return [Replacement(*span, what) for span, what in zip(around, found.groups(), strict=True)]

    def _written(self, place: str, text: str, media: "Sequence[Decoded]") -> str:
        """Return the text that the processor has tokenized in the place of another."""
        return self.recorded(place, text, media)[0].written

    def recorded(self, place: str, text: str, media: "Sequence[Decoded]", **options: Any) -> tuple[Recorder, dict[str, Any]]:
        """Return what the processor has tokenized for a text with media, and what it makes of them."""
        with self._recording:
            tokenizer = self._processor.tokenizer
            self._processor.tokenizer = recorder = Recorder(tokenizer)
            try:
                return recorder, self._arrays(place, [text], [media], **options)
            finally:
                self._processor.tokenizer = tokenizer

    def count(self, ids: Any) -> int:
        """Count the tokens that a model takes for parts of media."""
        return int(np.isin(ids, [*self.token_ids]).sum())

    def arrays(
        self, media: "Sequence[Decoded]", place: str, ids: "NDArray[Any] | None" = None, text: str | None = None
    ) -> "dict[str, NDArray[Any]]":
        """Make the arrays of the media of one text, as the processor does: pixels, spectrograms, ...

        Args:
            media: of the text, in order.
            place: of the row.
            ids: int[S], the tokens of the text, to be compared.
            text: of these, where nothing was prepared.

        Raises:
            DataError: the processor refuses the media; its own message is included. Or it makes more or fewer tokens of them
                than the text has.
        """
        if ids is not None and self._arrays_of_places:
            made = self._arrays(place, [self._stand_in(ids)], [media])
        else:
            made = self._arrays_of_media(place, [media])
        now, then = (self.count(tokens) for tokens in (made["input_ids"], () if ids is None else ids))
        if ids is not None and now != then and text is not None:
            named = next((name for each in self.token_ids if (name := self.text_of(each)) in text), "a token of one")
            raise DataError(
                f"{place}: its text has {named!r} in it, which stands for a part of {self._what} of this model; take it out of "
                "the text"
            )
        if ids is not None and now != then:
            raise DataError(
                f"{place}: {self.name} makes {now} tokens of the row's media, which were prepared as {then}; prepare the rows "
                "again, with the processor in use, and with `on_overflow` set to drop if they were cut"
            )
        return {name: _array(values) for name, values in made.items() if name not in (*_NO_ARRAYS, *_OF_TOKENS)}

    def joining(self) -> "dict[Kind, dict[str, Joining]]":
        """Find how the processor joins the arrays of several texts, on some with unlike media.

        They are one's behind another's. Some processors pad images to the largest of a batch, or texts to the most images; and
        audio to the longest.

        Returns:
            dict: of each kind for each of its arrays, but for those of kinds before; without kinds of which some do not join in
            a way that is known here, or join an array of another kind in another way.
        """
        known: dict[Kind, dict[str, Joining]] = {}
        if self._arrays_of_places:
            return known
        for kind in self.placeholders:
            before = {name: each for found in known.values() for name, each in found.items()}
            try:
                found = self._joining_of(kind)
            except Exception:  # noqa: BLE001, S112 - a processor may raise anything, and arrays of unlike shapes do not join
                continue
            if all(each is not None and alike(before.get(name, each), each) for name, each in found.items()):
                known[kind] = {name: each for name, each in found.items() if each is not None and name not in before}
        return known

    def _joining_of(self, kind: Kind) -> "dict[str, Joining | None]":
        made = made_up_media(kind, self.sampling_rate)
        rows = [made[:1], made[1:3], *([medium] for medium in made[3:])]
        # Of audio `padding` would be another than each has alone.
        padding: dict[str, Any] = {"text_kwargs": {"padding": True}} if kind == "audio" else {"padding": True}
        try:
            apart = [self.arrays(row, "") for row in rows]
        except DataError:
            # One clip a text is all that some take (GLM-ASR).
            rows = [[medium] for medium in made]
            apart = [self.arrays(row, "") for row in rows]
        try:
            together = self._arrays_of_media("", rows, **padding)
        except DataError:
            if kind != "video":
                raise
            # Videos of as many frames are all that some take at once (InternVL), though a model may take any.
            rows = [[each.first(2)] for each in made]
            found = self._joined_as([self.arrays(row, "") for row in rows], self._arrays_of_media("", rows), exactly=True)
            return {name: each and fitting(each, [of[name] for of in apart]) for name, each in found.items()}
        return self._joined_as(apart, together, exactly=kind != "audio")

    def _joined_as(self, apart: list[Any], together: dict[str, Any], *, exactly: bool) -> "dict[str, Joining | None]":
        return {name: joining([of[name] for of in apart], np.asarray(together[name]), exactly=exactly) for name in apart[0]}

    def of_tokens(self, ids: "NDArray[Any]", prompt: int | None = None) -> "dict[str, NDArray[Any]]":
        """Make the arrays with a number for each token: int64[1, S] by name.

        Of `prompt` tokens all see each other, where the model has them so; None: of all.
        """
        if self.takes_suffix:
            return {PREFIX: (np.arange(len(ids)) >= (len(ids) if prompt is None else prompt)).astype(np.int64)[None]}
        if not self._arrays_of_tokens:
            return {}
        kinds = np.asarray(self._processor.create_mm_token_type_ids([ids.tolist()]), dtype=np.int64)
        # Beside the processor's numbers a tokenizer's own say which text a token is of, and there is one.
        first = self._arrays_of_tokens[0]
        found = {name: kinds if name == first else np.zeros_like(kinds) for name in self._arrays_of_tokens}
        for name in found.keys() & {_OF_TOKENS[-1]}:
            # For the experts of Ernie 4.5, marks of images are of an image too.
            found[name] = np.asarray(self._processor.create_moe_mm_token_type_ids([ids.tolist()]), dtype=np.int64)
        return found

    @cached_property
    def _arrays_of_tokens(self) -> tuple[str, ...]:
        try:
            made = self._call("", ["0"], None)
        except DataError:
            # One that takes no text alone has nothing for it.
            return ()
        return tuple(name for name in _OF_TOKENS if name in made)

    @cached_property
    def _arrays_of_places(self) -> frozenset[str]:
        """Arrays with numbers for each token that follow from the places of images (Mllama)."""
        if "image" not in self.placeholders:
            return frozenset()
        pixels, found = made_up_images()[:1], []
        for words in (6, 9):
            try:
                made = self._arrays("", [self._filler * words + self.placeholders["image"]], [pixels])
            except DataError:
                return frozenset()
            size = len(made["input_ids"][0])
            others = made.keys() - {*_NO_ARRAYS, *_OF_TOKENS}
            found.append({name for name in others if tuple(np.shape(made[name]))[:2] == (1, size)})
        return frozenset(found[0] & found[1])

    @property
    def _filler(self) -> str:
        """A text that is one token, and marks no image."""
        tokenizer = self._processor.tokenizer
        return tokenizer.bos_token or tokenizer.eos_token or ""

    def _stand_in(self, ids: "NDArray[Any]") -> str:
        """Return a text with as many tokens as `ids`, and images at the same places."""
        mark = self.placeholders["image"]
        return "".join(mark if number in self.token_ids else self._filler for number in ids.tolist())

    def _check_arrays(self, place: str, made: Any, ids: "NDArray[np.int32]", media: "Sequence[Decoded]") -> None:
        """Refuse arrays of a text that training could not make again from ids and images.

        Raises:
            TokenizerError: naming one.
        """
        again: dict[str, Any] = dict(self.of_tokens(ids))
        if self._arrays_of_places:
            one_each = np.isin(ids, [*self.token_ids]).sum() == len(media)
            arrays = self.arrays(media, place, ids) if one_each else {}
            again |= {name: arrays.get(name) for name in self._arrays_of_places}
        for name in sorted(again):
            if np.array_equal(np.asarray(made.get(name)), again[name]):
                continue
            raise TokenizerError(
                f"{place}: {self.name} makes {name} of the text in a way of its own, so rows with {self._what} of this model "
                "cannot be trained here"
            )

    def _arrays_of_media(self, place: str, rows: "Sequence[Sequence[Decoded]]", **options: Any) -> dict[str, Any]:
        """Call the processor with placeholders alone: some make nothing of images without text."""
        texts = ["".join(self.placeholders[kind_of(each)] for each in row) for row in rows]
        try:
            return self._arrays(place, texts, rows, **options)
        except DataError:
            if any(kind_of(each) != "image" for row in rows for each in row):
                raise
            marks = [str(getattr(self._processor, f"image_{side}_token", None) or "") for side in ("start", "end")]
            if not all(marks):
                raise
        # Some want an image's marks around its placeholder (HunYuan-VL).
        return self._arrays(place, [self.placeholders["image"].join(marks) * len(row) for row in rows], rows, **options)

    def _arrays(self, place: str, texts: list[str], media: "Sequence[Sequence[Decoded]]", **options: Any) -> dict[str, Any]:
        try:
            return dict(self._call(place, texts, media, return_tensors="np", **options))
        except DataError as error:
            told = any(each in str(error).lower() for each in (_BFLOAT16, "return_tensors", "numpy.ndarray"))
            if not told and not any(isinstance(each, Video) for row in media for each in row):
                raise
        # NumPy has no bfloat16, in which some processors give pixels; float32 holds the same numbers. Others (GLM-ASR,
        # Inkling) give tensors of PyTorch alone, or cut those of videos as such (InternVL).
        made = self._call(place, texts, media, return_tensors="pt", **options)
        return {
            name: values.float() if _BFLOAT16 in str(getattr(values, "dtype", "")) else values for name, values in made.items()
        }

    def _call(self, place: str, texts: list[str], media: "Sequence[Sequence[Decoded]] | None", **options: Any) -> Any:
        given: dict[str, Any] = {}
        images = [[each for each in row if kind_of(each) == "image"] for row in media or ()]
        if audio := [each for row in media or () for each in row if kind_of(each) == "audio"]:
            given |= {"audio": audio, "sampling_rate": self.sampling_rate}
        if any(images):
            given["images"] = images
        if videos := [each for row in media or () for each in row if isinstance(each, Video)]:
            # Frames were chosen when they were read. Muse Glimmer writes times, and has none where they are not asked for.
            given |= {"videos": [each.frames for each in videos], "do_sample_frames": False}
            given |= {"video_metadata": [each.metadata() for each in videos], "return_metadata": True}
        try:
            return self._processor(text=texts, **given, **({"add_special_tokens": False} | options))
        except Exception as error:
            raise DataError(f"{place}: {self.name} refuses the row: {error}") from error

    def _legacy(self, where: str = "", why: str = "") -> TokenizerError:
        return TokenizerError(
            f"{where}{self.name} does not say what it writes in place of {self._what} (return_text_replacement_offsets), "
            f"as transformers' older processors do not, so rows with it of this model cannot be trained here{why}"
        )
