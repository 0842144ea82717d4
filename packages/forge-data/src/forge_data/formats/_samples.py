"""Types of what a row becomes: `Sample` once it is read, `Encoded` once it is tokenised."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from forge_data._example import TokenizedExample
from forge_data._media import Media

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ranges = tuple[tuple[int, int], ...]
"""Stretches [start, stop) of a text, in characters, in order."""


class Stretches(NamedTuple):
    """What a message says of stretches of its content."""

    learned: Ranges
    as_message: Ranges = ()
    """Those that say nothing: learned where the message is learned without them."""


Message = dict[str, Any]
"""One turn as the chat template gets it: role, content (string or None), reasoning_content, tool_calls, ..."""


@attrs.frozen
class Chat:
    """A conversation, with everything that its chat template is given."""

    place: str
    """Place of the row, such as `train.jsonl:417`."""
    messages: list[Message]
    first_completion: int = 0
    """Messages before this one are the prompt of a row and never learned under `assistant` or `last`."""
    trains: tuple[bool, ...] | None = None
    """One per message, false where it has `train: false` or `weight: 0`; None where no message has either."""
    asks: Mapping[int, Stretches | None] = attrs.field(factory=dict)
    """Messages that say of themselves what is learned of them: the learned stretches of the content, or None for all of it."""
    unmask: bool = False
    """Flag of instructlab's rows: learn everything but system messages."""
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    template_kwargs: dict[str, Any] = attrs.field(factory=dict)
    weight: float = 1.0
    """Weight of the row."""
    weights: tuple[float, ...] | None = None
    """One per message, beside that of the row; None where all are 0 or 1, which `trains` says."""
    media: tuple[Media, ...] = ()
    """In the order of the parts `{"type": "image"}` and `{"type": "audio"}` of the messages; contents are lists of parts where
    they have some."""
    system_added: bool = False
    """Whether the first message is not the row's own but `system_prompt`."""


@attrs.frozen
class Text:
    """Prompt and completion as plain text; the completion is learned."""

    place: str
    prompt: str
    completion: str
    weight: float = 1.0
    media: tuple[Media, ...] = ()
    places: tuple[int, ...] = ()
    """Character of the prompt before which each medium stands."""


@attrs.frozen
class Pieces:
    """Texts that are tokenised one by one, each learned or not; no token lies across two."""

    place: str
    texts: tuple[str, ...]
    learned: tuple[bool, ...]
    bare: bool = False
    """Whether nothing is added: no BOS before the first text, no EOS behind the last."""
    weight: float = 1.0


@attrs.frozen
class Document:
    """Plain text, all of it learned, with one EOS at its end."""

    place: str
    text: str
    weight: float = 1.0


@attrs.frozen(eq=False)
class Tokens:
    """A row of token ids int32[S] and a mask bool[S], true where a token is learned."""

    place: str
    input_ids: "NDArray[np.int32]"
    trained: "NDArray[np.bool_]"
    document: bool = False
    """Whether it is a document of pretraining, which one EOS ends."""
    weights: "NDArray[np.float32] | None" = None
    """float32[S], weight of each token, 0 where nothing is learned; None where every learned token counts 1."""
    weight: float = 1.0
    """Weight of the row, by which those of its tokens are multiplied."""


@attrs.frozen
class Preference:
    """Two answers to one prompt. Each is tokenised with the prompt, and the answer is learned."""

    place: str
    chosen: Chat | Text
    rejected: Chat | Text
    margin: float | None = None
    """By how much the chosen answer is better, where the row gives it."""


@attrs.frozen
class Unpaired:
    """One answer, and whether it is wanted."""

    place: str
    answer: Chat | Text
    desirable: bool


Sample = Chat | Text | Pieces | Document | Tokens | Preference | Unpaired


@attrs.frozen
class Note:
    """Something that only encoding can see in a row, for the lint; `rule` is one of its rules."""

    rule: str
    field: str
    """Field, such as `messages[3].reasoning_content`."""
    what: str
    warns: bool = False
    """Whether it is worth a look and no more, whatever the rule says."""
    texts: tuple[str, str] | None = None
    """Two texts to be seen side by side."""


@attrs.frozen
class Encoded:
    """The examples that one sample became."""

    examples: tuple[TokenizedExample, ...]
    """One, or one for each learned turn; for a `Preference` two, chosen and rejected."""
    desirable: bool | None = None
    """For an `Unpaired`: whether it is wanted."""
    notes: tuple[Note, ...] = ()
    margin: float | None = None
    """For a `Preference`: its margin, where the row gives it."""
    pair: bool = False
    """Whether it is a `Preference`."""
    forms: frozenset[str] = frozenset()
    """How its conversations were rendered, where the row does not say it."""
