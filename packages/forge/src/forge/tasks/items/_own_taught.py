"""Rows that two models read → rows whose answers one writes itself, and the other reads.

The teacher's tokens of a completion are those of its text (`forge_data.AnswerReader`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

import forge_data
import forge_packing
from forge.tasks.items._items import Ints
from forge.tasks.items._own_answers import IGNORED, prompt_length
from forge.tasks.items._taught import TaughtBatch, TaughtRows

_ROOM = 1.5
"""Room for a completion in the teacher's tokens, in those that it has of a text as long in the rows."""


class Completion(NamedTuple):
    """What a model wrote, as both have it."""

    ids: Any
    """int32[C]."""
    theirs: forge_data.TaughtAnswer


class OwnTaught(TaughtRows):
    """Rows with room for a completion in the place of their last learned stretch, on both sides.

    Beyond the teacher's room a completion is not compared, so that micro-batches are planned before anything is sampled.
    """

    def __init__(self, store: forge_data.TokenStore, teacher_path: str, max_new_tokens: int) -> None:
        super().__init__(store)
        self._teacher_path, self.max_new_tokens, self._made_up = teacher_path, max_new_tokens, False
        self._last: Ints = self._ends[1:] - 1
        self.prompt_lengths: Ints = np.array([prompt_length(self.store, at) for at in self._last], np.int64)
        """int64[N]: the model's tokens before the last stretch that is learned."""
        texts = [self.store.taught(int(at))[0] for at in self._last]
        before = np.array([sum(map(len, each[:-1])) for each in texts], np.int64)
        self._begins: Ints = self.store.teacher_runs[self._last] - before
        of = self.store.settings["alignment"]
        self.teacher_room = math.ceil(_ROOM * max_new_tokens * max(1, of["teacher_tokens"] / of["tokens"]))
        """Most tokens of a completion that the teacher reads."""
        room = np.maximum(self.prompt_lengths + max_new_tokens, self._begins + self.teacher_room)
        self._room = room
        self._room_is_longest = bool(room.max() > self.longest.max())
        self.lengths, self.longest = np.maximum(self.lengths, room), np.maximum(self.longest, room)

    @property
    def shorter(self) -> str:  # type: ignore[override]  # of other rows it is the same for all
        """Setting that makes the longest item shorter, one with room for a completion or not."""
        return "lower max_new_tokens, which is counted with each prompt" if self._room_is_longest else TaughtRows.shorter

    @property
    def media(self) -> None:
        """None: rows that two tokenizers read have no images."""

    def media_of(self, indices: Sequence[int]) -> dict[str, Any]:  # noqa: ARG002 - as of rows that may have images
        """Return {}: rows that two tokenizers read have no images."""
        return {}

    def prompt(self, index: int) -> Any:
        """Return int32[S], what the model is asked instead of learning an item."""
        return self.store[int(self._last[index])].input_ids[: self.prompt_lengths[index]]

    def read(
        self, indices: Sequence[int], completions: Sequence[Any], ended: Sequence[bool]
    ) -> tuple[Sequence[Completion], dict[str, float]]:
        """Return completions as both have them, and the share of tokens in common spans."""
        read = [Completion(*each) for each in zip(completions, map(self._read, indices, completions, ended), strict=True)]
        compared = sum(int((theirs.spans[:, 1] - theirs.spans[:, 0]).sum()) for _, theirs in read)
        return read, {"rollout_compared": compared / sum(map(len, completions))}

    def with_completions(self, indices: Sequence[int] | Ints, completions: Sequence[Completion]) -> TaughtBatch:
        """Pack prompts of items, each with a completion, into a row of either model."""
        samples, texts, spans = [], [], [np.zeros((0, 4), np.int64)]
        begins = np.zeros(2, np.int64)
        for index, (completion, theirs) in zip(map(int, indices), completions, strict=True):
            prompts = self.prompt(index), self.store.taught(int(self._last[index]))[0][-1][: self._begins[index]]
            ids, text = (np.append(*each).astype(np.int32) for each in zip(prompts, (completion, theirs.ids), strict=True))
            labels = np.append(np.full(len(prompts[0]), IGNORED, np.int32), completion).astype(np.int32)
            samples.append(forge_data.TokenizedExample(ids, labels))
            texts.append((text, np.full(len(text), IGNORED, np.int32)))
            spans.append(theirs.spans + np.repeat(begins + [len(each) for each in prompts], 2))
            begins += len(ids), len(text)
        return TaughtBatch(forge_packing.collate(samples), forge_packing.collate(texts), np.concatenate(spans))

    def made_up(self) -> Self:
        """Return the same items, whose batches are as large as those of any step may be."""
        same = copy(self)
        same._made_up = True
        return same

    def batch(self, indices: Sequence[int] | Ints) -> TaughtBatch:
        """Pack items as they are in the data, or with as long completions as there may be."""
        if not self._made_up:
            return super().batch(indices)
        size = min(self.max_new_tokens, self.teacher_room)
        spans = np.arange(size)[:, None] + np.array([0, 1, 0, 1])
        sides = [np.zeros(room, np.int32) for room in (self.max_new_tokens, self.teacher_room)]
        whole: Any = forge_data.TaughtAnswer(sides[1], spans.astype(np.int32))
        return self.with_completions(indices, [Completion(sides[0], whole)] * len(indices))

    @cached_property
    def _reader(self) -> forge_data.AnswerReader:
        return forge_data.AnswerReader(self.store.tokenizer(), forge_data.load_tokenizer(self._teacher_path))

    def _read(self, index: int, completion: Any, ended: bool) -> forge_data.TaughtAnswer:
        """Return the teacher's tokens of a completion, as many as there is room for."""
        at = int(self._last[index])
        sample, begin = self.store[at], int(self._begins[index])
        found = self._reader((sample.input_ids, sample.labels), self.store.taught(at)[0][-1], begin, completion, ended=ended)
        room = self.teacher_room
        return forge_data.TaughtAnswer(found.ids[:room], found.spans[found.spans[:, 3] <= room])
