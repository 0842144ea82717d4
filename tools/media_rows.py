"""The rows of a family's checks: conversations, pairs, rated answers and prompts with images, audio, both or videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from media_configs import AUDIO, BOTH, IMAGE, VIDEO, Family
from media_parts import pictures
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import load_video

import forge_data
from tests import films
from tests.whole import (
    test_images_of_answers as rated_answers,
    test_images_of_pairs as pairs,
    test_images_online as prompted,
    texts,
)
from tests.whole.conftest import write_rows

ROWS = 12


class Rows:
    """Files of rows with one medium, with two and with none, in turn, as far as the family's processor takes them."""

    def __init__(self, family: Family, kind: str, folder: Path) -> None:
        self.kind, self.folder, self._family = kind, folder, family
        of_texts = (texts.inputs_of, texts.pairs_of, texts.Rated)
        of_messages = (pictures.inputs_of, pairs.pairs_of, rated_answers.Answers)
        # What the model's processor makes of rows, of both sides of pairs, and of rated answers.
        self.inputs_of, self.pairs_of, self.answers = of_texts if family.plain else of_messages
        self._fewest, self._most = family.media if kind in {AUDIO, VIDEO} else (0, 2)

    @property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of media that the rows have."""
        return frozenset({BOTH: (IMAGE, AUDIO), VIDEO: (VIDEO, *self._family.beside)}.get(self.kind, (self.kind,)))

    def _media(self, number: int) -> int:
        return self._fewest + (number + 1) % (self._most - self._fewest + 1)

    def conversations(self) -> Path:
        """Write conversations of one or two turns, or plain texts."""
        if self._family.plain:
            return texts.rows(self.folder, ROWS)
        if self.kind == BOTH:
            rows = [_both(self.folder, number) for number in range(ROWS)]
        else:
            rows = [pictures.conversation(self.folder, each, self._media(each), self.kind) for each in range(ROWS)]
        for number, row in enumerate(rows):
            self._film(row["messages"], number)
        return write_rows(self.folder / "rows.jsonl", rows)

    def _pairs(self) -> list[dict[str, Any]]:
        rows = [pictures.pair(self.folder, each, self._media(each), self.kind) for each in range(ROWS)]
        for number, row in enumerate(rows):
            self._film(row["prompt"], number)
        return rows

    def preferences(self) -> Path:
        """Write prompts with a chosen and a rejected answer."""
        if self._family.plain:
            return write_rows(self.folder / "pairs.jsonl", [texts.pair(texts.row(self.folder, each)) for each in range(ROWS)])
        return write_rows(self.folder / "pairs.jsonl", self._pairs())

    def rated(self) -> Path:
        """Write rated answers, a third of them unwanted."""
        if self._family.plain:
            found = [texts.rated_row(texts.row(self.folder, each), each) for each in range(ROWS)]
            return write_rows(self.folder / "rated.jsonl", found)
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen" if each % 3 else "rejected"], "label": bool(each % 3)}
            for each, row in enumerate(self._pairs())
        ]
        return write_rows(self.folder / "rated.jsonl", rows)

    def prompts(self) -> Path:
        """Write prompts, what is to be answered, and the rewards' module."""
        (self.folder / "picture_rewards.py").write_text(prompted.REWARDS, encoding="utf-8")
        if self._family.plain:
            return self.conversations()
        rows = [{"prompt": row["prompt"], "answer": row["chosen"][0]["content"]} for row in self._pairs()]
        return write_rows(self.folder / "prompts.jsonl", rows)

    def _film(self, messages: list[dict[str, Any]], number: int) -> None:
        """Make files of the videos of every other row, or of all, and put other media beside those of some."""
        if self.kind != VIDEO:
            return
        videos = [part for message in messages for part in _parts(message) if part["type"] == VIDEO]
        for medium, part in enumerate(videos):
            if number % 2 or not self._family.lists:
                file, size = f"images/{number}_{medium}.mp4", self._family.sizes[(number + medium) % 3]
                films.film(self.folder / file, 8 + 3 * (number % 3) + medium, [4, 5, 3][number % 3], size)
                part["video"] = file
        asked = messages[0]
        for kind, of in ((IMAGE, (1, 2)), (AUDIO, (2, 3))):
            if kind in self._family.beside and number % 4 in of:
                parts = _parts(asked) or [{"type": "text", "text": asked["content"]}]
                asked["content"] = [*parts, self._still(kind, number)] if number % 3 else [self._still(kind, number), *parts]

    def _still(self, kind: str, number: int) -> dict[str, str]:
        file = f"images/{number}_beside.{'png' if kind == IMAGE else 'wav'}"
        if kind == IMAGE:
            pictures.picture(number).save(self.folder / file)
        else:
            pictures.clip(self.folder / file, number)
        return {"type": kind, kind: file}


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else []


def _both(folder: Path, number: int) -> dict[str, Any]:
    """Return a conversation with up to two images and up to two clips, in either order."""
    row = pictures.conversation(folder, number, (number + 1) % 3, IMAGE)
    other = pictures.conversation(folder, number, number // 2 % 3, AUDIO)
    for message, heard in zip(row["messages"], other["messages"], strict=True):
        clips = [part for part in heard["content"] if isinstance(part, dict) and part["type"] == AUDIO]
        if clips:
            parts = message["content"]
            parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
            message["content"] = [*clips, *parts] if number % 2 else [*parts, *clips]
    return row


# --- what plain transformers makes of videos --------------------------------------------------------------------------------


class Asking:
    """A processor that is asked for videos as rows have them: lists of frames whole, texts by the directory's template.

    SmolVLM's takes another template for videos where it is given none. Muse's writes times into the text, and fails where the
    video processor is not told to return them.
    """

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def apply_chat_template(self, messages: list[dict[str, Any]], **more: Any) -> Any:
        """Return what the processor makes."""
        videos = [part["video"] for message in messages for part in _parts(message) if part["type"] == VIDEO]
        own: dict[str, Any] = {"return_metadata": True} if videos else {}
        own |= {"do_sample_frames": False} if any(isinstance(each, list) for each in videos) else {}
        made = self._found.apply_chat_template(messages, self._found.chat_template, processor_kwargs=own, **more)
        made.pop("video_metadata", None)
        return made


def _fetch_videos(self: Any, given: Any, sample_indices_fn: Any = None) -> Any:
    """As transformers' own, with PyAV where that takes torchcodec."""
    if isinstance(given, list):
        return [*zip(*(_fetch_videos(self, each, sample_indices_fn) for each in given), strict=True)]
    return load_video(given, backend="pyav", sample_indices_fn=sample_indices_fn)


@cache
def ask_for_videos() -> None:
    """Have the oracles of this process read videos."""
    own = pictures._processor
    pictures._processor = cache(lambda model: Asking(own(model)))
    VideoProcessorMixin.fetch_videos = _fetch_videos  # type: ignore[method-assign]


def same_arrays(
    store: forge_data.TokenStore,
    model: Path,
    inputs: Callable[[forge_data.TokenStore, int], Mapping[str, torch.Tensor]],
) -> None:
    """Compare the arrays of every row with those of the model's processor, bit by bit."""
    ours = forge_data.MediaInputs(model)
    for at in range(len(store)):
        if not store[at].media:
            continue
        theirs = {name: np.asarray(array) for name, array in inputs(store, at).items() if name != "attention_mask"}
        made = {name: np.asarray(array) for name, array in ours(store[at]).items()}
        assert made.keys() == theirs.keys(), f"{store.source(at)}: {sorted(made)}, and of the processor {sorted(theirs)}"
        for name, array in theirs.items():
            same = made[name].dtype == array.dtype and np.array_equal(made[name], array)
            assert same, f"{store.source(at)}: {name} is not the processor's"
