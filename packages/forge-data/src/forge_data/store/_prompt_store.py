"""Prepared prompts on disk: their tokens, their text, and the other fields of their rows."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self, overload

import attrs
import numpy as np

from forge_data.store._base import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray


@attrs.frozen(eq=False)
class Prompt:
    """What a model is asked; `len(prompt)` is S."""

    input_ids: "NDArray[np.int32]"
    """int32[S], tokens that the model continues from: for messages with the chat template's generation prompt. Of a query with
    its documents those of all texts, one after another, of which the column `lengths` has the number of each."""

    prompt: str | list[dict[str, Any]]
    """The same as the row has it: text, or messages as the chat template gets them."""

    columns: dict[str, Any]
    """Every further field of the row, as a JSON value; one that is null counts as absent."""

    def __len__(self) -> int:
        return len(self.input_ids)


class PromptStore(Store):
    """N prompts on disk; `store[i]` is a `Prompt`, `len(store)` is N.

    Open one with `PromptStore.open(directory)`; `forge_data.prepare_prompts` makes one. `store[10:20]`, `select`
    and `split` give views.
    """

    _of_prompts = True
    _plural = "prompts"

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Prompt | Self:
        if isinstance(index, slice):
            return self._slice(index)
        at = self._stored_index(index)
        bounds, ends = self._bounds, self._arrays["record_offsets.bin"]
        record = json.loads(self._arrays["records.bin"][ends[at] : ends[at + 1]].tobytes())
        return Prompt(self._ids[bounds[at] : bounds[at + 1]], record["prompt"], record["columns"])

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"PromptStore({str(self.path)!r}, prompts={len(self)}, tokens={int(self.lengths.sum())})"
