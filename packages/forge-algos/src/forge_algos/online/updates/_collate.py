"""One flat row of groups from prompts and completions, like `forge_packing.collate_groups`.

The packages do not import each other; a test of the repository compares the two. Here prompts are known as such, so that
nothing has to be compared.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_algos.batches._groups import PackedGroups, _Groups
from forge_algos.batches._packed import IGNORE

Group = tuple[NDArray[Any], Sequence[NDArray[Any]]]
"""Prompt, int[S] with S from 1, and its completions, int[S] each with S from 1."""

Example = tuple[NDArray[Any], NDArray[Any]]
"""input_ids and labels, int[S] each: a prompt with a completion, -100 where nothing is learned."""

Collate = Callable[[Sequence[Sequence[Example]]], PackedGroups]
"""Function (groups of examples, the completions of one prompt each) → one row, such as `forge_packing.collate_groups`."""


def collate(
    groups: Sequence[Group], *, share_prompts: bool = False, learned: Sequence[NDArray[np.bool_]] | None = None
) -> PackedGroups:
    """Make one padding-free row; with `share_prompts` a group's prompt stands in it once.

    `forge_algos.shares_prompts` reports where that gives the same. No groups give an empty row. `learned` has bool[S] of each
    completion, one after another: the tokens that are learned, at least one; None is all.
    """
    ids: list[NDArray[Any]] = []
    rows: list[NDArray[Any]] = []
    # Of each segment: tokens, the tokens of its prompt that stand elsewhere, and where those begin.
    segments: list[tuple[int, int, int]] = []
    targets: list[NDArray[Any]] = []
    masks = None if learned is None else iter(learned)
    at = 0
    for prompt, completions in groups:
        first = at
        for number, completion in enumerate(completions):
            elsewhere = len(prompt) if share_prompts and number else 0
            own = [completion] if elsewhere else [prompt, completion]
            ids += own
            tokens = sum(map(len, own))
            at += tokens
            # The prompt's last token predicts the first; each further one is predicted by the one before it.
            before = first + len(prompt) - 1 if elsewhere else at - len(completion) - 1
            predicting = np.append(before, np.arange(at - len(completion), at - 1))
            mask = slice(None) if masks is None else next(masks)
            rows.append(predicting[mask])
            targets.append(np.asarray(completion)[mask])
            segments.append((tokens, elsewhere, first))
    tokens_n, elsewhere_n, first_n = np.array(segments, np.int64).reshape(-1, 3).T
    starts = np.append(0, tokens_n.cumsum())
    keys = starts_k = None
    if elsewhere_n.any():
        starts_k = np.append(0, (tokens_n + elsewhere_n).cumsum())
        keys = np.concatenate(
            [
                np.append(np.arange(first, first + shared), np.arange(start, start + tokens))
                for start, tokens, shared, first in zip(starts, tokens_n, elsewhere_n, first_n, strict=False)
            ]
        )
    nothing = [np.zeros(0, np.int64)]
    return _Groups(
        input_ids=np.concatenate([*nothing, *ids]).astype(np.int64),
        position_ids=np.arange(at) - np.repeat(starts[:-1] - elsewhere_n, tokens_n),
        rows=np.concatenate([*nothing, *rows]),
        targets=np.concatenate([*nothing, *targets]).astype(np.int64),
        lengths=np.array([len(each) for each in targets], np.int64),
        ends=starts[1:] - 1,
        group_sizes=np.array([len(completions) for _, completions in groups], np.int64),
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=int(tokens_n.max(initial=0)),
        kv_rows=keys,
        cu_seqlens_k=None if starts_k is None else starts_k.astype(np.int32),
        max_seqlen_k=None if starts_k is None else int(np.diff(starts_k).max()),
    )


def examples(groups: Sequence[Group], learned: Sequence[NDArray[np.bool_]] | None = None) -> list[list[Example]]:
    """Return the same groups as a `Collate` takes them; `learned` as `collate` has it."""
    masks = None if learned is None else iter(learned)
    found = []
    for prompt, completions in groups:
        unlearned = np.full(len(prompt), IGNORE, np.int64)
        found.append([])
        for completion in completions:
            labels = np.asarray(completion) if masks is None else np.where(next(masks), completion, IGNORE)
            found[-1].append((np.concatenate([prompt, completion]), np.concatenate([unlearned, labels])))
    return found
