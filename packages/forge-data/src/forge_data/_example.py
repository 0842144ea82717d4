"""One sample as it is trained on."""

from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

IGNORED = -100
"""The label that PyTorch's cross entropy skips."""


@attrs.frozen(eq=False)
class TokenizedExample:
    """One sample of S tokens; `len(example)` is S.

    Labels are not shifted: `labels[t]` is `input_ids[t]` where token t is learned and -100 where it is not.
    The loss predicts token t from the tokens before it, so `labels[0]` never counts.
    """

    input_ids: "NDArray[np.int32]"
    """int32[S], token ids."""

    labels: "NDArray[np.int32]"
    """int32[S], the same ids where loss is counted, -100 elsewhere."""

    @classmethod
    def from_mask(cls, input_ids: "NDArray[np.int32]", trained: "NDArray[np.bool_]") -> "TokenizedExample":
        """From ids int32[S] and a mask bool[S], true where a token is learned."""
        return cls(input_ids, np.where(trained, input_ids, np.int32(IGNORED)))

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def loss_count(self) -> int:
        """How many labels count in the loss: those of `labels[1:]` that are not -100."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED))
