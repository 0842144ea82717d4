"""Tokenizer → the encoder of the last calls, while nothing that it depends on changed.

Making one compiles the chat template and looks at the whole vocabulary, which takes as long as dozens of rows.
"""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_data.tokenizing._encoder import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST = 4
"""Encoders that a thread keeps; each keeps its tokenizer."""


class _Kept(NamedTuple):
    """An encoder, and what its tokenizer was like when it was made."""

    encoder: Encoder
    state: tuple[Any, ...]


class _Encoders(threading.local):
    """Encoders of one thread by tokenizer and `train_on`, the least recently used first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[int, str], _Kept] = OrderedDict()


_encoders = _Encoders()


def kept_encoder(tokenizer: "PreTrainedTokenizerBase", train_on: str) -> Encoder:
    """Return the encoder of the last calls; a new one where tokenizer or template changed since."""
    kept = _encoders.kept
    # An encoder holds its tokenizer, so no other one can have its id meanwhile.
    key, state = (id(tokenizer), train_on), _state(tokenizer)
    found = kept.get(key)
    if found is None or found.state != state:
        found = kept[key] = _Kept(Encoder(tokenizer, train_on), state)
    kept.move_to_end(key)
    while len(kept) > _MOST:
        kept.popitem(last=False)
    return found.encoder


def _state(tokenizer: Any) -> tuple[Any, ...]:
    """Return what an encoder depends on and a caller may change: template, tokens, backend."""
    backend = tokenizer.backend_tokenizer
    template = tokenizer.chat_template
    return (
        dict(template) if isinstance(template, dict) else template,
        {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()},
        dict(tokenizer.special_tokens_map),
        getattr(tokenizer, "split_special_tokens", False),
        len(tokenizer),
        # A part that is replaced is another object; of those that are changed in place, the post-processor is the usual one.
        str(backend.post_processor),
    )
