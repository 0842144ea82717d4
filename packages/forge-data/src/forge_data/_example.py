"""`TokenizedExample`: one sample as it is trained on."""

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forge_data._media import Media

if TYPE_CHECKING:
    from numpy.typing import NDArray

IGNORED = -100
"""Label that PyTorch's cross entropy skips."""

ROLES = ("template", "system", "developer", "user", "assistant", "tool", "prompt", "completion", "document", "tokens")
"""Roles of segments; a store keeps indices into this table, so names are only ever appended."""


def _no_segments() -> "NDArray[np.int32]":
    return np.zeros((0, 2), dtype=np.int32)


@attrs.frozen(eq=False)
class TokenizedExample:
    """One sample of S tokens; `len(example)` is S.

    Labels are not shifted: `labels[t]` is `input_ids[t]` where token t is learned and -100 where it is not. The loss predicts
    token t from the tokens before it, so `labels[0]` never counts.
    """

    input_ids: "NDArray[np.int32]"
    """int32[S], token ids."""

    labels: "NDArray[np.int32]"
    """int32[S], the same ids where loss is counted, -100 elsewhere."""

    segments: "NDArray[np.int32]" = attrs.field(factory=_no_segments)
    """int32[K, 2], tokens [start, stop) of each segment; together they are all S tokens, in order.

    A turn's header and end belong to the turn; text of the template itself is a segment of the role `template`."""

    roles: tuple[str, ...] = ()
    """K names of `ROLES`: the role of each segment."""

    weights: "NDArray[np.float32] | None" = None
    """float32[S], by how much the loss term of each token counts, 0 where nothing is learned. A loss is the weighted sum
    divided by the sum of the weights. None where every learned token counts 1."""

    media: tuple[Media, ...] = ()
    """Its images in the order of their tokens, which are never learned."""

    @classmethod
    def from_mask(
        cls,
        input_ids: "NDArray[np.int32]",
        trained: "NDArray[np.bool_]",
        segments: "NDArray[np.int32] | None" = None,
        roles: tuple[str, ...] = (),
    ) -> "TokenizedExample":
        """Make one of ids int32[S] and a mask bool[S], true where a token is learned."""
        labels = np.where(trained, input_ids, np.int32(IGNORED))
        return cls(input_ids, labels, _no_segments() if segments is None else segments, roles)

    def as_dict(self) -> "dict[str, NDArray[Any]]":
        """Copy into plain arrays: `input_ids`, `labels` (int64[S]); `weights` (float32[S]) if any.

        torch's `default_collate` makes tensors of them; it stacks examples of one length only, so others are padded first.
        """
        plain: dict[str, NDArray[Any]] = {
            "input_ids": self.input_ids.astype(np.int64), "labels": self.labels.astype(np.int64)
        }  # fmt: skip
        return plain if self.weights is None else plain | {"weights": np.array(self.weights)}

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def loss_count(self) -> int:
        """Number of labels that count in the loss: those of `labels[1:]` that are not -100."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED))
