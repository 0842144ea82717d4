"""Collation of groups: completions of one prompt → one flat row, a PackedGroups."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_TOKENS, Int64Array, checked_bool
from forge_packing._errors import PackingError
from forge_packing.collating._collate import IGNORE, AnyExample, concatenated, example_arrays


@attrs.frozen(kw_only=True, eq=False)
class PackedGroups:
    """One flat row of B completions in G groups, T tokens in all, M of them learned.

    Segment j of the row holds the tokens that completion j adds to it. Where prompts are shared, a group's first segment is
    its prompt and its first completion, and each further one is a completion alone, which attends to the keys and values of
    the prompt and of itself. Otherwise each segment is a prompt and its completion.
    """

    input_ids: Int64Array
    """int64[T]: token ids."""
    position_ids: Int64Array
    """int64[T]: positions in each completion's own sequence, so that a completion continues those of its prompt."""
    rows: Int64Array
    """int64[M]: the position whose logits predict each learned token, completion after completion. The last position of a
    shared prompt occurs once for each completion whose first token is learned."""
    targets: Int64Array
    """int64[M]: the learned tokens."""
    lengths: Int64Array
    """int64[B]: learned tokens of each completion; they add up to M."""
    ends: Int64Array
    """int64[B]: the position of each completion's last token, where a reward is read."""
    group_sizes: Int64Array
    """int64[G]: completions of each group; they add up to B."""
    cu_seqlens: npt.NDArray[np.int32]
    """int32[B+1]: the first position of each segment, and T at the end."""
    max_seqlen: int
    """Tokens in the longest segment; 0 in an empty row."""
    kv_rows: Int64Array | None = None
    """int64[Tk]: segment after segment, the positions whose keys and values it attends to: its prompt's, then its own, so that
    its last query is at its last key. None where no prompt is shared: each segment attends to itself alone."""
    cu_seqlens_k: npt.NDArray[np.int32] | None = None
    """int32[B+1]: where each segment starts in `kv_rows`, and Tk at the end; None as `kv_rows`."""
    max_seqlen_k: int | None = None
    """The most keys of a segment; None as `kv_rows`."""


class _Completion(NamedTuple):
    """The tokens that one example adds to the row."""

    input_ids: np.ndarray
    labels: np.ndarray
    shared: int
    """Tokens of the example that are earlier in the row already: those of its shared prompt."""


def collate_groups(groups: Iterable[Sequence[AnyExample]], *, share_prompt: bool = False) -> PackedGroups:
    """Pack groups of completions into one flat row.

    The first token of an example is never learned, whatever its label: nothing predicts it. No groups give an empty row
    (cu_seqlens is [0]): a rank without work in this pass. The examples are not changed.

    Args:
        groups: Sequences of examples, the completions of one prompt each. An example is whole: prompt and completion, the
            prompt's labels -100.
        share_prompt: False repeats the prompt, so that every example is a document by itself. True puts a group's prompt into
            the row once: the longest prefix that all of the group's examples have in common, in which nothing is learned, and
            which leaves each a token of its own. It needs an attention that reads `kv_rows`. Where no group has such a prefix
            the row is that of False.

    Raises:
        PackingError: a group is empty or no sequence; or an example is empty, not of integers, or its two lengths differ.


    >>> pair = [([5, 6, 7, 8], [-100, -100, 7, 8]), ([5, 6, 9], [-100, -100, 9])]
    >>> batch = collate_groups([pair], share_prompt=True)
    >>> batch.input_ids.tolist(), batch.position_ids.tolist(), batch.cu_seqlens.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 3, 2], [0, 4, 5])
    >>> batch.rows.tolist(), batch.targets.tolist(), batch.kv_rows.tolist()
    ([1, 2, 1], [7, 8, 9], [0, 1, 2, 3, 0, 1, 4])
    """
    share = checked_bool("share_prompt", share_prompt)
    completions: list[_Completion] = []
    sizes: list[int] = []
    for index, group in enumerate(groups):
        members = _members(index, group)
        sizes.append(len(members))
        shared = _common_prompt(members) if share else 0
        completions.append(_Completion(*members[0], 0))
        completions.extend(_Completion(ids[shared:], labels[shared:], shared) for ids, labels in members[1:])
    return _row(completions, np.array(sizes, dtype=np.int64))


def _members(index: int, group: Sequence[AnyExample]) -> list[tuple[np.ndarray, np.ndarray]]:
    try:
        examples = [] if hasattr(group, "input_ids") else list(group)
    except TypeError:
        examples = []
    if not examples:
        raise PackingError(
            f"group {index} is a {type(group).__name__} without examples: give the completions of one prompt as a sequence, "
            "such as [chosen, rejected]"
        )
    return [_unweighted(f"{place} of group {index}", example) for place, example in enumerate(examples)]


def _unweighted(name: str, example: AnyExample) -> tuple[np.ndarray, np.ndarray]:
    ids, labels, weights = example_arrays(name, example)
    if weights is not None:
        raise PackingError(f"example {name} has weights, which completions that are compared cannot have; leave them out")
    return ids, labels


def _common_prompt(members: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """Count the first tokens that all members share.

    None of them is learned, and they are not the whole of any member.
    """
    limit = min(ids.size for ids, _ in members) - 1
    if len(members) == 1 or not limit:
        return 0
    first = members[0][0][:limit]
    same = np.ones(limit, dtype=bool)
    for ids, labels in members:
        same[1:] &= labels[1:limit] == IGNORE
        same &= ids[:limit] == first
    return limit if same.all() else int(same.argmin())


def _row(completions: list[_Completion], group_sizes: Int64Array) -> PackedGroups:
    shared_B = np.array([completion.shared for completion in completions], dtype=np.int64)
    lengths_B = np.array([completion.input_ids.size for completion in completions], dtype=np.int64)
    starts = np.append(0, np.cumsum(lengths_B))
    starts_k = np.append(0, np.cumsum(lengths_B + shared_B))
    total, total_k = int(starts[-1]), int(starts_k[-1])
    if total_k > MAX_TOKENS:
        raise PackingError(f"{total_k} tokens are too many for one row: cu_seqlens is int32, so at most {MAX_TOKENS}")
    labels = concatenated([completion.labels for completion in completions])
    labels[starts[:-1][shared_B == 0]] = IGNORE
    learned = np.flatnonzero(labels != IGNORE)
    # The prompt of a completion begins at the first segment of its group.
    prompts_B = np.repeat(starts[np.append(0, np.cumsum(group_sizes))[:-1]], group_sizes)
    rows = learned - 1
    at = np.searchsorted(learned, starts)
    begins = np.flatnonzero((shared_B > 0) & (np.diff(at) > 0))
    begins = begins[learned[at[begins]] == starts[begins]]
    rows[at[begins]] = prompts_B[begins] + shared_B[begins] - 1
    keys = _keys(starts, starts_k, shared_B, prompts_B) if shared_B.any() else None
    return PackedGroups(
        input_ids=concatenated([completion.input_ids for completion in completions]),
        position_ids=np.arange(total) - np.repeat(starts[:-1] - shared_B, lengths_B),
        rows=rows,
        targets=labels[learned],
        lengths=np.diff(at),
        ends=starts[1:] - 1,
        group_sizes=group_sizes,
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=int(lengths_B.max()) if lengths_B.size else 0,
        kv_rows=keys,
        cu_seqlens_k=None if keys is None else starts_k.astype(np.int32),
        max_seqlen_k=None if keys is None else int((lengths_B + shared_B).max()),
    )


def _keys(starts: Int64Array, starts_k: Int64Array, shared_B: Int64Array, prompts_B: Int64Array) -> Int64Array:
    """Return the positions whose keys each segment attends to, one after another: int64[Tk]."""
    keys_B = np.diff(starts_k)
    place = np.arange(starts_k[-1]) - np.repeat(starts_k[:-1], keys_B)
    own = np.repeat(starts[:-1] - shared_B, keys_B)
    return place + np.where(place < np.repeat(shared_B, keys_B), np.repeat(prompts_B, keys_B), own)
