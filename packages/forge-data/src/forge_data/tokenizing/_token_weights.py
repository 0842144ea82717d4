"""Weights of a row's messages → weights of its tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from forge_data._example import IGNORED, TokenizedExample
from forge_data.chat_template._trace import Run
from forge_data.formats._samples import Chat, Document, Text, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray


def weights_of(part: Chat | Text | Document) -> "NDArray[np.float32] | None":
    """Return the weights of the messages, and last that of any other text: float32[n + 1].

    None where all of them are 0 or 1, which what is learned says already.
    """
    own = part.weights if isinstance(part, Chat) else None
    if own is None and part.weight == 1:
        return None
    count = len(part.messages) if isinstance(part, Chat) else 2
    return np.array([*(own or (1.0,) * count), 1.0], dtype=np.float32) * np.float32(part.weight)


def weighed(
    example: TokenizedExample, begins: "NDArray[np.int64]", runs: Sequence[Run], weights: "NDArray[np.float32]"
) -> TokenizedExample:
    """Return an example whose tokens have the weights of the messages that they belong to.

    Args:
        example: of S tokens.
        begins: int64[S], the first character that each token stands for.
        runs: which message wrote which characters, in order.
        weights: as `weights_of` returns them.
    """
    starts, owners = np.array([(start, owner) for start, _, owner in runs] or [(0, -1)]).T
    # The owner of what no message wrote is -1, which is the last weight.
    return with_weights(example, weights[owners[np.searchsorted(starts, begins, side="right") - 1]])


def row_weights(tokens: Tokens) -> "NDArray[np.float32] | None":
    """Return the weights of a row of token ids: float32[S], or None where all are 1.

    They are of use where a token is learned.
    """
    if tokens.weights is None and tokens.weight == 1:
        return None
    own = 1 if tokens.weights is None else tokens.weights
    return np.where(tokens.trained, own, 1).astype(np.float32) * np.float32(tokens.weight)


def with_weights(example: TokenizedExample, weights: "NDArray[np.float32] | None") -> TokenizedExample:
    """Return an example with weights float32[S]; a token without weight is not learned."""
    if weights is None:
        return example
    labels = np.where(weights > 0, example.labels, np.int32(IGNORED))
    learned = labels != IGNORED
    own = None if (weights[learned] == 1).all() else np.where(learned, weights, np.float32(0)).astype(np.float32)
    return attrs.evolve(example, labels=labels, weights=own)
