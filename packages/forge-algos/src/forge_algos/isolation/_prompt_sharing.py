"""Tests whether completions may share their prompt in a packed row, on a model's attention.

Attention that does not know `kv_rows` would ignore it silently, and a kernel that is given more keys than there are would read
beyond them. So a function that does not name the argument is not even tried, and one that does is compared.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos._modules import attention_of, causal_model, virtual_tokens
from forge_algos.batches._packed import packed_inputs
from forge_algos.isolation._alone import runs_alone
from forge_algos.isolation._by_layers import Run, in_row
from forge_algos.isolation._compare import Compare, decides
from forge_algos.isolation._isolation import (
    hidden_states,
    made_up_ids,
    run_test,
    with_and_without_autocast,
)

Answer = tuple[bool, str]

_answers: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Answer]] = WeakKeyDictionary()

# A document of 5 tokens, then a group: a prompt of 4, completions of 3, 2 and 3.
_POSITIONS = (0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 4, 5, 4, 5, 6)
_SEGMENTS = (5, 7, 2, 3)
_SEEN = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9, 10, 11), (5, 6, 7, 8, 12, 13), (5, 6, 7, 8, 14, 15, 16))
_OWN = (5, 3, 2, 3)
"""Tokens at the end of each that are not the prompt's."""
_NAMES = ("a document before the group", "the first completion", "the second completion", "the third completion")


def shares_prompts(
    model: nn.Module, *, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Answer:
    """Return (whether, why) the model runs a group whose prompt stands in the row once.

    It does if every completion of a made-up group comes out as it does alone and does not depend on the others. Tried once for
    each model, attention, number of virtual tokens and device; modes, gradients and random state stay as they were. Tried in
    the weights' dtype, and under `autocast` (or the caller's) too, where another kernel may run. Where a model is divided over
    ranks, every rank calls it, and all decide alike.
    """
    causal = causal_model(model)
    known, key = _answers.setdefault(causal, {}), (*_conditions(model), device)
    if key in known:
        return known[key]
    # The guard must let the test pass; an error that is no answer leaves no entry behind.
    known[key] = True, "being tried"
    try:
        known[key] = _answer(model, causal, device, autocast)
    except BaseException:
        del known[key]
        raise
    return known[key]


def assume(model: nn.Module, *, share: bool, why: str, device: torch.device) -> None:
    """Let `shares_prompts` answer so for a model without numbers, instead of probing it."""
    _answers.setdefault(causal_model(model), {})[(*_conditions(model), device)] = share, why


def may_share_prompts(model: nn.Module) -> bool:
    """Return whether `shares_prompts` found it possible with the present attention and tokens."""
    asked, known = _conditions(model), _answers.get(causal_model(model), {})
    return any(can for (*what, _), (can, _) in known.items() if tuple(what) == asked)


def require_sharing(model: nn.Module) -> None:
    """Raise PackedBatchError unless `may_share_prompts`.

    transformers' attention would leave the shared prompt out silently.
    """
    if not may_share_prompts(model):
        raise PackedBatchError(
            f"samples that share what they begin with (kv_rows) came to attention {attention_of(causal_model(model))!r}, which "
            "was not shown to share prompts: ask forge_algos.shares_prompts first, and where it is False collate with "
            "share_prompt=False, or by collate in place of collate_shared"
        )


def _conditions(model: nn.Module) -> tuple[str | None, int, bool]:
    """Return what the answer depends on beside the device.

    That is the attention, the number of virtual tokens, and whether documents are run alone.

    An adapter that is attached later leaves the causal model the same object.
    """
    return attention_of(causal_model(model)), virtual_tokens(model), runs_alone(model)


def _answer(
    model: nn.Module, causal: nn.Module, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
) -> Answer:
    if runs_alone(model):
        return False, "documents are run alone: each completion is computed with a prompt of its own"
    attention = attention_of(causal)
    if attention is not None and not _knows_rows(attention):
        return False, f"attention {attention!r} does not know kv_rows: each completion is computed with a prompt of its own"
    if virtual_tokens(model):
        return False, "virtual tokens stand before each completion: each is computed with a prompt of its own"
    what = f"{type(causal).__name__} with attention {attention!r}"
    problem, refusal = run_test(with_and_without_autocast(_problem, autocast), model, device)
    if refusal is not None:
        return False, f"{what} cannot run a row with a shared prompt: {refusal}"
    if problem:
        return False, f"{what} does not share prompts: {problem}"
    return True, f"{what} gives completions that share a prompt what it gives each alone, in a made-up group"


def _knows_rows(attention: str) -> bool:
    from transformers import AttentionInterface

    function = AttentionInterface().get(attention)
    return function is not None and "kv_rows" in inspect.signature(function).parameters


def _problem(model: nn.Module, device: torch.device) -> str | None:
    ids, vocab = made_up_ids(model, len(_POSITIONS), device)
    shared = cache(partial(_shared, model, ids))

    def in_shared(rows: Sequence[int]) -> torch.Tensor:
        return shared()[list(rows)]

    def changed_but(rows: Sequence[int]) -> torch.Tensor:
        others = torch.ones_like(ids)
        others[list(rows)] = 0
        return (ids + others) % vocab

    def alone(rows: Sequence[int]) -> torch.Tensor:
        positions = torch.arange(len(rows), device=device)
        return hidden_states(model, packed_inputs(ids[list(rows)], positions, torch.tensor([0, len(rows)]), len(rows)))

    with Compare(model, decides(model)) as compare:

        @cache
        def apart(which: int) -> bool:
            rows = _SEEN[which]
            return compare.by_layers(
                shared,
                Run(lambda: _shared(model, ids)[None], in_row(len(ids), rows)),
                Run(lambda: alone(rows)[None], in_row(len(rows), range(len(rows)))),
                Run(lambda: _shared(model, changed_but(rows))[None], in_row(len(ids), rows)),
                own=_OWN[which],
            )

        # A completion's own tokens by themselves too: its prompt's would be half of all, and are right without a prompt.
        for which, name in enumerate(_NAMES):
            rows = _SEEN[which]
            if not compare.equal(partial(in_shared, rows), partial(alone, rows), own=_OWN[which]) and not apart(which):
                return f"{name} comes out otherwise than alone"
        changed, last = ids.clone(), _SEEN[3]
        changed[9:14] = (ids[9:14] + 1) % vocab
        other = partial(_shared, model, changed)
        if not compare.equal(lambda: other()[list(last)], partial(in_shared, last), own=_OWN[3]) and not apart(3):
            return "the third completion changes with those before it"
    return None


def _shared(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Run the made-up row with a shared prompt; returns hidden states (or logits) float[T, D]."""
    boundaries, keys = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (_SEGMENTS, [len(rows) for rows in _SEEN]))
    inputs = packed_inputs(ids, torch.tensor(_POSITIONS, device=ids.device), boundaries, max(_SEGMENTS))
    inputs["kv_rows"] = torch.tensor([row for rows in _SEEN for row in rows], device=ids.device)
    inputs["cu_seq_lens_k"] = keys.to(ids.device, torch.int32)
    inputs["max_length_k"] = max(len(rows) for rows in _SEEN)
    return hidden_states(model, inputs)
