"""Tokens of an answer → their log-probabilities, as OpenAI's interface has them.

They are the model's own, at temperature 1 and before penalties: the log-softmax of its logits.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import forge_data
from forge.talking._stops import end_of

_LEAST = -9999.0
"""In the place of minus infinity, which JSON has not; OpenAI's number for it."""
_BEFORE = 8
"""Tokens before one with which its text is found: a character may be four."""
_PART = "\ufffd"
"""What a part of a character is decoded to."""


class _Drawn(NamedTuple):
    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


class _Read(NamedTuple):
    text: str
    """What a token adds to an answer; of one that ends no character nothing."""
    data: bytes
    """Bytes of it; of a part of a character the token's own."""


class Logprobs:
    """Record of the tokens that a model draws for one answer.

    Args:
        model: which generates.
        most: how many of the likeliest tokens are kept beside each.

    """

    def __init__(self, model: Any, most: int) -> None:
        self._model, self._most, self._logits = model, most, None
        self._drawn: list[_Drawn] = []

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Keep the logits of each forward meanwhile: what processes them later changes them."""

        def heard(_module: Any, _given: Any, made: Any) -> None:
            self._logits = made.logits[0, -1].detach().float()

        handle = self._model.register_forward_hook(heard)
        try:
            yield
        finally:
            handle.remove()

    def criterion(self) -> Any:
        """Return a stopping criterion that never stops, and is told of each token."""
        import torch
        from transformers import StoppingCriteria

        record = self

        class Told(StoppingCriteria):
            def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
                record._add(int(input_ids[0, -1]))
                return torch.zeros(input_ids.shape[:1], dtype=torch.bool, device=input_ids.device)

        return Told()

    def _add(self, token: int) -> None:
        logits: Any = self._logits
        logps = logits.log_softmax(-1).clamp(min=_LEAST)
        values, tokens = logps.topk(min(self._most, len(logps)))
        likeliest = list(zip(tokens.tolist(), values.tolist(), strict=True))
        self._drawn.append(_Drawn(token, float(logps[token]), likeliest))

    def of_messages(self, tokenizer: Any, stop: Sequence[str]) -> dict[str, Any]:
        """Return `logprobs` of a chat completion's choice."""
        return {"content": [_entry(*one) for one in self._read(tokenizer, stop)], "refusal": None}

    def of_text(self, tokenizer: Any, stop: Sequence[str]) -> dict[str, Any]:
        """Return `logprobs` of a completion's choice, the drawn among the likeliest tokens.

        A token that is no text of its own, a part of a character, is named by its bytes.
        """
        read = self._read(tokenizer, stop)
        starts = [sum(len(one.text) for one, _, _ in read[:at]) for at in range(len(read))]
        return {
            "tokens": [_name(one) for one, _, _ in read],
            "token_logprobs": [logprob for _, logprob, _ in read],
            "top_logprobs": [
                {_name(one): logprob} | {_name(other): of_other for other, of_other in reversed(others)}
                for one, logprob, others in read
            ],
            "text_offset": starts,
        }

    def _read(self, tokenizer: Any, stop: Sequence[str]) -> list[tuple[_Read, float, list[tuple[_Read, float]]]]:
        """Return text, log-probability and likeliest tokens for each before a stop string."""
        ids, found, length = [one.token for one in self._drawn], [], 0
        texts = [_text(tokenizer, ids[:at], token) for at, token in enumerate(ids)]
        end = end_of("".join(each.text for each in texts), stop)
        for at, (one, read) in enumerate(zip(self._drawn, texts, strict=True)):
            ended = at == len(ids) - 1 and one.token in tokenizer.all_special_ids
            if length < end or (not stop and not ended):
                others = [(_text(tokenizer, ids[:at], token, special=True), logprob) for token, logprob in one.likeliest]
                found.append((read, one.logprob, others))
            length += len(read.text)
        return found


def _text(tokenizer: Any, before: Sequence[int], token: int, *, special: bool = False) -> _Read:
    """Return what a token adds to a text, a special one its name if those are asked for."""
    if special and token in tokenizer.all_special_ids:
        name = str(tokenizer.convert_ids_to_tokens(token))
        return _Read(name, name.encode())
    near = list(before[-_BEFORE:])
    known, made = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (near, [*near, token]))
    text = str(made.rstrip(_PART)[len(known.rstrip(_PART)) :])
    within = known.endswith(_PART) or made.endswith(_PART)
    if not within or token in tokenizer.all_special_ids or not hasattr(tokenizer, "backend_tokenizer"):
        return _Read(text, text.encode())
    # Of a run of byte tokens, of which the last character is a part, SentencePiece's decoder gives no character at all.
    *told, own = _spelling(tokenizer).of([*near, token])
    decoder = getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(told))
    return _Read(decoder.decode(own), own)


@lru_cache(1)
def _spelling(tokenizer: Any) -> forge_data.Spelling:
    """Return the bytes of a tokenizer's tokens, whose whole vocabulary is read for them."""
    return forge_data.Spelling(tokenizer)


def _name(read: _Read) -> str:
    r"""Return a token's text, or OpenAI's form of bytes that are none.

    >>> _name(_Read("plum", b"plum")), _name(_Read("", b"\xe2\x80"))
    ('plum', 'bytes:\\xe2\\x80')
    """
    return read.text if read.text.encode() == read.data else "bytes:" + "".join(f"\\x{byte:02x}" for byte in read.data)


def _entry(read: _Read, logprob: float, others: Sequence[tuple[_Read, float]] | None = None) -> dict[str, Any]:
    entry = {"token": read.text, "logprob": logprob, "bytes": list(read.data)}
    return entry if others is None else entry | {"top_logprobs": [_entry(*each) for each in others]}
