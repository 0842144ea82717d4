"""What a row is once it was understood, and what became of it once it was tokenised: the types that pass between the files."""

from typing import TYPE_CHECKING, Any

import attrs

from forge_data._example import TokenizedExample

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Message = dict[str, Any]
"""One turn as the chat template gets it: role, content (string or None), reasoning_content, tool_calls, ..."""


@attrs.frozen
class Chat:
    """A conversation, with all that the template is told about it."""

    place: str
    """`train.jsonl:417`."""
    messages: list[Message]
    first_completion: int = 0
    """Messages before this one are the prompt of a prompt/completion row and never learned under `assistant` or `last`."""
    trains: tuple[bool, ...] | None = None
    """One a message, false where the row says `train: false` (or `weight: 0`); None where no message says anything."""
    unmask: bool = False
    """instructlab's row flag: learn everything but system messages."""
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    template_kwargs: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Text:
    """Plain prompt and completion; the completion is learned."""

    place: str
    prompt: str
    completion: str


@attrs.frozen
class Document:
    """Plain text, all of it learned, and one EOS at its end."""

    place: str
    text: str


@attrs.frozen(eq=False)
class Tokens:
    """A row that came as tokens; ids int32[S] and a mask bool[S], true where a token is learned."""

    place: str
    input_ids: "NDArray[np.int32]"
    trained: "NDArray[np.bool_]"
    document: bool = False
    """A document of pretraining: one EOS is to be at its end."""


@attrs.frozen
class Preference:
    """Two answers to one prompt. Both are tokenised whole (prompt and answer), the answer is what is learned."""

    place: str
    chosen: Chat | Text
    rejected: Chat | Text
    margin: float | None = None
    """By how much the chosen answer is better, where the row says so."""


@attrs.frozen
class Unpaired:
    """One answer and whether it is wanted."""

    place: str
    answer: Chat | Text
    desirable: bool


Sample = Chat | Text | Document | Tokens | Preference | Unpaired


@attrs.frozen
class Note:
    """Something about one row that only encoding can see, for the lint; `rule` is a name of `_lint`'s rules."""

    rule: str
    field: str
    """Such as `messages[3].reasoning_content`."""
    what: str


@attrs.frozen
class Encoded:
    """What one sample became."""

    examples: tuple[TokenizedExample, ...]
    """One; for a `Preference` two, chosen and rejected."""
    desirable: bool | None = None
    """For an `Unpaired`: is it wanted."""
    notes: tuple[Note, ...] = ()
    margin: float | None = None
    """For a `Preference`: by how much the chosen answer is better, where its row says so."""
