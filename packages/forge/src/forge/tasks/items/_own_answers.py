"""Token stores → rows whose answers the trained model may be asked to write itself."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import forge_data
import forge_packing
from forge._errors import SettingsError
from forge.tasks.items._items import Ints
from forge.tasks.items._samples import Conversations, Samples

IGNORED = -100
"""Label of a token that is not learned."""


class OwnAnswers(Samples):
    """Rows with room for a completion in the place of their last learned stretch.

    A micro-batch has room for either, so that its rows are the same whichever is learned. Nothing is shared between rows.
    """

    shorter = "lower max_new_tokens, or max_seq_len to drop longer rows"

    def __init__(self, store: Any, max_new_tokens: int) -> None:
        import numpy as np

        super().__init__(store)
        self.max_new_tokens = max_new_tokens
        self._made_up = False
        self.prompt_lengths: Ints = np.array([_prompt_length(store, at) for at in self._last()], np.int64)
        """int64[N]: tokens before the last stretch that is learned; 0 where nothing is."""
        room = np.where(self.prompt_lengths > 0, self.prompt_lengths + max_new_tokens, 0)
        self.lengths = np.maximum(self._tokens(), room)
        self.longest = np.maximum(self.longest, room)

    def prompt(self, index: int) -> Any:
        """Return int32[S], what the model is asked instead of learning an item."""
        ids = self.store[self._last()[index]].input_ids
        return ids[: self.prompt_lengths[index]]

    def with_completions(self, indices: Sequence[int], completions: Sequence[Any]) -> Any:
        """Pack prompts of items, each with a completion that is learned, into one row."""
        import numpy as np

        samples = []
        for index, ids in zip(indices, completions, strict=True):
            prompt = self.prompt(index)
            labels = np.append(np.full(len(prompt), IGNORED, np.int32), ids)
            samples.append((np.append(prompt, ids).astype(np.int32), labels.astype(np.int32)))
        return forge_packing.collate(samples)

    def made_up(self) -> Self:
        """Return the same items, whose batches are as large as those of any step may be."""
        same = copy(self)
        same._made_up = True
        return same

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack items as they are in the data into one row."""
        import numpy as np

        if not self._made_up:
            return forge_packing.collate([self.store[at] for i in map(int, indices) for at in self._samples(i)])
        asked = [int(i) for i in indices if self.lengths[i] > self._tokens()[i]]
        others = [at for i in map(int, indices) if i not in asked for at in self._samples(i)]
        made = self.with_completions(asked, [np.zeros(self.max_new_tokens, np.int32)] * len(asked))
        rows = [(made.input_ids[a:b], made.labels[a:b]) for a, b in zip(made.cu_seqlens[:-1], made.cu_seqlens[1:], strict=True)]
        return forge_packing.collate([*rows, *(self.store[at] for at in others)])

    def _last(self) -> Any:
        """Index the last sample of each item."""
        return range(len(self.store))

    def _tokens(self) -> Ints:
        """Return int64[N], the tokens of each item as it is."""
        return self.store.lengths

    def _samples(self, index: int) -> range:
        return range(index, index + 1)


class OwnConversations(OwnAnswers, Conversations):
    """Rows of which some are several samples; the last one may be answered anew."""

    def _last(self) -> Any:
        return self._ends[1:] - 1

    def _tokens(self) -> Ints:
        return self.unshared

    def _samples(self, index: int) -> range:
        return range(self._ends[index], self._ends[index + 1])


def own_answers(store: forge_data.TokenStore, max_new_tokens: int) -> OwnAnswers:
    """Return the items of a store with room for own completions.

    Raises:
        SettingsError: a row is learned from its first token on, so that nothing is left to ask.

    """
    return (OwnAnswers if store.conversations is None else OwnConversations)(store, max_new_tokens)


def _prompt_length(store: Any, index: int) -> int:
    import numpy as np

    learned = np.flatnonzero(np.asarray(store[index].labels)[1:] != IGNORED) + 1
    if not len(learned):
        return 0
    breaks = np.flatnonzero(np.diff(learned) > 1)
    start = int(learned[breaks[-1] + 1] if len(breaks) else learned[0])
    if start > 1:
        return start
    raise SettingsError(
        f"{store.source(index)}: is learned from its beginning, so that on_policy has no prompt to ask the model. Take rows "
        "with prompts and train_on=assistant, last or completion, or leave on_policy out."
    )
