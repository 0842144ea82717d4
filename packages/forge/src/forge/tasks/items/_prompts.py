"""Stores of prompts → prompts with room for a completion that is sampled while training."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, Self

import numpy as np

import forge_data
from forge._counted import counted
from forge.tasks.items._items import Ints
from forge.tasks.items._media import MediaRows, PromptMedia, media_in_words

_CANDIDATES, _COMPARED = 64, 4


class Prompts:
    """Prompts, each with room for a completion of `max_new_tokens`."""

    shorter = "lower max_new_tokens or max_prompt_len"
    lines: Ints | None = None

    def __init__(self, store: forge_data.PromptStore, *, max_new_tokens: int) -> None:
        self.store = store
        self.lengths = self.longest = store.lengths + max_new_tokens
        self.loss_counts = np.full(len(store), max_new_tokens, dtype=np.int64)
        self.weights = store.weights
        self.sources = None if store.weights is None else store.sources
        self.media: PromptMedia | None = None
        """Of the prompts, by their rows; None where no prompt of the run has any."""
        self.layout: MediaRows = "packed"
        """How completions behind prompts with images lie in a micro-batch."""

    def with_media(self, inputs: forge_data.MediaInputs, rows: MediaRows) -> Self:
        """Return the same prompts, whose completions are given their images."""
        same = copy(self)
        same.media, same.layout = PromptMedia(self.store, inputs), rows
        return same

    @property
    def media_counts(self) -> Ints:
        """int64[N, 2]: images of each prompt, and tokens that stand for those."""
        return self.store.media_counts

    @property
    def how(self) -> dict[str, Any]:
        """How completions are given images, as arguments of `make_rollout` and `rollout_batches`."""
        return self.pictures and {**self.pictures, "layout": self.layout}

    @property
    def pictures(self) -> dict[str, Any]:
        """The images of completions, as arguments of `rollout_batches`; {} without any."""
        return {} if self.media is None else {"media": self.media, "join_media": self.media.join}

    def media_of(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the images of prompts as an argument of a sampler; {} in a run without any."""
        known = self.media
        return {} if known is None else {"media": [partial(known.__getitem__, row) if row in known else None for row in rows]}

    def __len__(self) -> int:
        return len(self.store)

    def __str__(self) -> str:
        return f"{counted(len(self), 'prompts')}{media_in_words(self.store, self.media_counts)}"

    def source(self, index: int) -> str:
        """Return the file and row of a prompt."""
        return self.store.source(index)

    def size(self, index: int) -> str:
        """Return the largest length of a prompt with its completion, in words."""
        return f"{self.source(index)} may have {self.lengths[index]:,} tokens with its completion"

    def batch(self, indices: Sequence[int] | Ints) -> list[forge_data.Prompt]:
        """Return the prompts as stored."""
        return [self.store[int(i)] for i in indices]

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short prompts as samples that are learned whole, to compare two models on."""
        rows = sorted(range(min(len(self), _CANDIDATES)), key=lambda row: int(self.store.lengths[row]))
        ids = [self.store[row].input_ids for row in rows if self.store.lengths[row] > 1][:_COMPARED]
        # Of one token nothing is predicted: where there are no longer ones it is given twice.
        ids = ids or [np.tile(self.store[row].input_ids, 2) for row in rows[-_COMPARED:] if self.store.lengths[row]]
        return [(each, each) for each in ids]
