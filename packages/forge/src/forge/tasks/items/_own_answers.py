"""Token stores → rows whose answers the trained model may be asked to write itself."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, Self

import forge_data
import forge_packing
from forge._errors import SettingsError
from forge.tasks.items._items import Ints
from forge.tasks.items._media import media_row
from forge.tasks.items._samples import IGNORED, Conversations, Samples, learned_positions


class OwnAnswers(Samples):
    """Rows with room for a completion in the place of their last learned stretch.

    A micro-batch has room for either, so that its rows are the same whichever is learned. Nothing is shared between rows.
    """

    def __init__(self, store: Any, max_new_tokens: int) -> None:
        import numpy as np

        super().__init__(store)
        self.max_new_tokens = max_new_tokens
        self._made_up = False
        self.prompt_lengths: Ints = np.array([prompt_length(store, at) for at in self._last()], np.int64)
        """int64[N]: tokens before the last stretch that is learned; 0 where nothing is."""
        room = np.where(self.prompt_lengths > 0, self.prompt_lengths + max_new_tokens, 0)
        self.lengths = np.maximum(self._tokens(), room)
        self._room_is_longest = bool(room.max(initial=0) > self.longest.max(initial=0))
        self.longest = np.maximum(self.longest, room)

    @property
    def shorter(self) -> str:  # type: ignore[override]  # of other samples it is the same for all
        """Setting that makes the longest item shorter, one with room for a completion or not."""
        return "lower max_new_tokens, which is counted with each prompt" if self._room_is_longest else Samples.shorter

    def prompt(self, index: int) -> Any:
        """Return int32[S], what the model is asked instead of learning an item."""
        return self._asked(index)[0].input_ids

    @property
    def media(self) -> forge_data.MediaInputs | None:
        """What reads the images of prompts; None in a run without any."""
        return self._media

    def media_of(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the images of prompts as an argument of a sampler; {} in a run without any."""
        if (inputs := self._media) is None:
            return {}
        asked = [self._asked(index) for index in indices]
        return {"media": [partial(inputs, each, place) if each.media else None for each, place in asked]}

    def read(
        self,
        indices: Sequence[int],  # noqa: ARG002 - as of rows that a teacher reads in its own tokens
        completions: Sequence[Any],
        ended: Sequence[bool],  # noqa: ARG002
    ) -> tuple[Sequence[Any], dict[str, float]]:
        """Return completions as `with_completions` takes them, and figures of what was read."""
        return completions, {}

    def with_completions(self, indices: Sequence[int], completions: Sequence[Any]) -> Any:
        """Pack prompts of items, each with a completion that is learned, into one row."""
        return self._row([self._asked(index, ids) for index, ids in zip(indices, completions, strict=True)])

    def made_up(self) -> Self:
        """Return the same items, whose batches are as large as those of any step may be."""
        same = copy(self)
        same._made_up = True
        return same

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack items as they are in the data into one row."""
        import numpy as np

        made = np.zeros(self.max_new_tokens if self._made_up else 0, np.int32)
        found: list[tuple[Any, str]] = []
        for index in map(int, indices):
            if len(made) and self.lengths[index] > self._tokens()[index]:
                found.append(self._asked(index, made))
            else:
                found += [(self.store[at], self.store.source(at)) for at in self._samples(index)]
        return self._row(found)

    def _asked(self, index: int, completion: Any = ()) -> tuple[forge_data.TokenizedExample, str]:
        """Return the prompt of an item, with a completion that is learned, and its place.

        A completion counts as the tokens that it replaces, by their mean weight.
        """
        import numpy as np

        at, begin = int(self._last()[index]), int(self.prompt_lengths[index])
        sample = self.store[at]
        labels = np.append(np.full(begin, IGNORED, np.int32), completion).astype(np.int32)
        ids = np.append(sample.input_ids[:begin], completion).astype(np.int32)
        weights = None
        if sample.weights is not None:
            replaced = sample.weights[begin:][sample.labels[begin:] != IGNORED]
            weights = np.append(np.zeros(begin), np.full(len(completion), replaced.mean())).astype(np.float32)
        media = tuple(medium for medium in sample.media if medium.stop <= begin)
        return forge_data.TokenizedExample(ids, labels, weights=weights, media=media), self.store.source(at)

    def _row(self, found: Sequence[tuple[Any, str]]) -> Any:
        row = forge_packing.collate([sample for sample, _ in found])
        samples, places = zip(*found, strict=True) if found else ((), ())
        return row if self._media is None else media_row(row, samples, places, self._media)

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


def prompt_length(store: Any, index: int) -> int:
    """Count the tokens of a sample before its last learned stretch; 0 where nothing is learned.

    Raises:
        SettingsError: it is learned from its first token on, so that nothing is left to ask.
    """
    import numpy as np

    sample = store[index]
    learned = learned_positions(sample)
    if not len(learned):
        return 0
    breaks = np.flatnonzero(np.diff(learned) > 1)
    start = int(learned[breaks[-1] + 1] if len(breaks) else learned[0])
    if start > 1 or sample.labels[0] == IGNORED:
        return start
    raise SettingsError(
        f"{store.source(index)}: is learned from its beginning, so that on_policy has no prompt to ask the model. Take rows "
        "with prompts and train_on=assistant, last or completion, or leave on_policy out."
    )
