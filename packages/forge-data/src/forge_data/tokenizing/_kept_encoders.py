"""Tokenizer → the encoder of the last calls, while nothing that it depends on changed.

Making one compiles the chat template and looks at the whole vocabulary, which takes as long as dozens of rows.
"""

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_data._options import Options
from forge_data.tokenizing._chat_template import with_template
from forge_data.tokenizing._encoder import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST = 4
"""Encoders that a thread keeps; each keeps its tokenizer."""


_Key = tuple[int, str, str, str | None, str, str]
"""The tokenizer's id, `train_on`, `turns`, `turn_end`, `train_on_turn_end`, and the template's arguments as JSON."""


class _Kept(NamedTuple):
    """An encoder, and what its tokenizer was like when it was made."""

    encoder: Encoder
    state: tuple[Any, ...]


class _Encoders(threading.local):
    """Encoders of one thread by tokenizer and options, the least recently used first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[_Key, _Kept] = OrderedDict()


_encoders = _Encoders()


def kept_encoder(tokenizer: "PreTrainedTokenizerBase", options: Options) -> Encoder:
    """Return the encoder of the last calls.

    A new one where the tokenizer or its template changed since, or where options name a template.
    """
    chosen = with_template(tokenizer, options.chat_template, options.chat_template_kwargs)
    given: dict[str, Any] = {
        "train_on": options.train_on, "turns": options.turns, "arguments": options.chat_template_kwargs,
        "turn_end": options.turn_end, "train_on_turn_end": options.train_on_turn_end,
    }  # fmt: skip
    if chosen is not tokenizer:
        return Encoder(chosen, **given)
    kept, arguments = _encoders.kept, json.dumps(options.chat_template_kwargs, sort_keys=True)
    # An encoder holds its tokenizer, so no other one can have its id meanwhile.
    key = (id(tokenizer), options.train_on, options.turns, options.turn_end, options.train_on_turn_end, arguments)
    found = _found(key, tokenizer)
    if found is None:
        found = kept[key] = _Kept(Encoder(tokenizer, **given), _state(tokenizer))
    while len(kept) > _MOST:
        kept.popitem(last=False)
    return found.encoder


def known_encoder(
    tokenizer: "PreTrainedTokenizerBase", train_on: str, turns: str, turn_end: str | None, train_on_turn_end: str
) -> Encoder | None:
    """Return the encoder that a call with these arguments left; None without one."""
    found = _found((id(tokenizer), train_on, turns, turn_end, train_on_turn_end, "{}"), tokenizer)
    return None if found is None else found.encoder


def _found(key: _Key, tokenizer: "PreTrainedTokenizerBase") -> _Kept | None:
    kept = _encoders.kept
    found = kept.get(key)
    if found is None or found.state != _state(tokenizer):
        return None
    kept.move_to_end(key)
    return found


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
