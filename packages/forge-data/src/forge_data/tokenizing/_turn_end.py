"""Tokenizer and chat template → the special token that ends every answer beside the EOS."""

import copy
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._errors import ForgeDataError
from forge_data._example import IGNORED
from forge_data.formats._samples import Chat
from forge_data.tokenizing._encoder import Encoder
from forge_data.tokenizing._named_templates import CHAT_TEMPLATES, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SYSTEM, _ASKED, _AGAIN = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is it"},
    {"role": "user", "content": "and then"},
)
_ANSWERS = ("it is so", "no more of that")
_FIRST, _LAST = ({"role": "assistant", "content": text} for text in _ANSWERS)
_TALKS = ([_ASKED, _FIRST], [_ASKED, _FIRST, _AGAIN, _LAST], [_SYSTEM, _ASKED, _LAST])
_TOOL = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _TOOL}]
_CALLS = [{"type": "function", "id": f"call{at}abcd", "function": {"name": "look", "arguments": {}}} for at in range(2)]
_PARTS: "tuple[dict[str, Any], ...]" = (
    {"reasoning_content": "let me see"},
    {"tool_calls": _CALLS[:1]},
    {"tool_calls": _CALLS},
    {"tool_calls": _CALLS, "content": ""},
)
"""What an answer may have beside its content, or for it: the token must not end it too early."""


def turn_end(template: "str | dict[str, str] | None", tokenizer: "PreTrainedTokenizerBase | None" = None) -> str | None:
    """Return the token that ends an answer in a chat template, which may be no EOS of the model.

    Of a named template it is known. Of any other, conversations are read as rows are: it is the one special token that follows
    the content of each answer, and stands in none before its end. None where the tokenizer's EOS ends a turn, or where there is
    no such token.

    Args:
        template: of a tokenizer, with defaults of arguments or without.
        tokenizer: the tokenizer; without it only named templates are known.
    """
    if isinstance(template, str):
        for name, row in CHAT_TEMPLATES.items():
            if template.endswith(text_of(name)):
                return row.end
    if tokenizer is None or not template:
        return None
    if tokenizer.chat_template != template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    try:
        return _found(tokenizer)
    except ForgeDataError:  # a template that cannot be learned from, or a tokenizer without offsets
        return None


def _found(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the end of all answers.

    Raises:
        ForgeDataError: the shortest conversation cannot be read.
    """
    encoder = Encoder(tokenizer)
    ends = set(_ends(_answers(encoder, _TALKS[0]), tokenizer))
    for talk in _TALKS[1:]:
        with suppress(ForgeDataError):  # the template takes no such conversation
            ends.update(_ends(_answers(encoder, talk), tokenizer))
    end = ends.pop()
    if ends or end is None or end == tokenizer.eos_token_id:
        return None
    for part, tools in product(_PARTS, (None, _TOOLS)):
        with suppress(ForgeDataError):
            turns = _answers(encoder, [_ASKED, {**_FIRST, **part}], tools)
            if len(turns) != 1 or end in turns[0][:-1]:
                return None
    return tokenizer.added_tokens_decoder[end].content


def _answers(encoder: Encoder, talk: list[dict[str, Any]], tools: list[Any] | None = None) -> list[list[int]]:
    """Return the ids of each learned stretch of a conversation."""
    (encoded,) = encoder.encode([Chat("the conversation", copy.deepcopy(talk), tools=copy.deepcopy(tools))])
    found: list[list[int]] = []
    for example in encoded.examples:
        learned = np.concatenate([[False], example.labels != IGNORED, [False]])
        edges = np.flatnonzero(learned[1:] != learned[:-1]).tolist()
        found += [example.input_ids[start:stop].tolist() for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return found


def _ends(turns: list[list[int]], tokenizer: "PreTrainedTokenizerBase") -> list[int | None]:
    """Return the ids that `_end_of` finds in turns; None where nothing is learned."""
    return [_end_of(turn, tokenizer) for turn in turns] or [None]


def _end_of(turn: list[int], tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id of the special token that alone follows a turn's content; None without one."""
    *before, last = turn
    token = tokenizer.added_tokens_decoder.get(last)
    if token is None or not token.special or last == tokenizer.unk_token_id or last in before:
        return None
    text = str(tokenizer.decode(before, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return last if text.rstrip().endswith(_ANSWERS) else None
