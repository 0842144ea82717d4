"""Collation of samples that begin alike, such as completions of a prompt → one flat row."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_TOKENS, Int64Array, checked_bool, checked_integer
from forge_packing._errors import PackingError
from forge_packing.collating._collate import IGNORE, AnyExample, concatenated, example_arrays


@attrs.frozen(kw_only=True, eq=False)
class PackedGroups:
    """One flat row of B completions in G groups, T tokens in all, M of them learned.

    Segment j of the row holds the tokens that completion j adds to it. Where prompts are shared, a group's first segment is
    its prompt and its first completion, and each further one is a completion alone, which attends to the keys and values of
    the prompt and of itself. Otherwise each segment is a prompt and its completion. Turns of a conversation (`collate_turns`)
    and samples by themselves (`collate_shared`) are completions too; each shares what it has in common with one before it.
    """

    input_ids: Int64Array
    """int64[T]: token ids."""
    position_ids: Int64Array
    """int64[T]: positions in each completion's own sequence, so that a completion continues those of its prompt."""
    rows: Int64Array
    """int64[M]: the position whose logits predict each learned token, completion after completion. A shared position occurs
    once for each completion that learns what follows it."""
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
    weights: npt.NDArray[np.float32] | None = None
    """float32[M]: by how much the loss term of each learned token counts; None where each counts 1. Turns alone have some."""


LEAST_PREFIX = 16
"""Tokens from which on samples of different groups share a prefix; a template's first tokens are not worth their gathering."""

_Example = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""input_ids and labels, int[S], and weights float32[S] or None."""


class _Sample(NamedTuple):
    """One example in the row."""

    input_ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None
    path: Int64Array
    """int64[S]: the position in the row of each of its tokens."""
    shared: int
    """Its first tokens that are in the row already."""


class _Row:
    """Samples in a row, one after another, each with what it shares with one before it."""

    def __init__(self) -> None:
        self.samples: list[_Sample] = []
        self.size = 0
        """Tokens of the row."""
        self._seen = 0
        self._sorted: list[tuple[bytes, _Sample]] = []

    def expect(self, examples: list[_Example]) -> None:
        """Count the tokens of examples before memory is taken for them.

        Raises:
            PackingError: there are too many.
        """
        self._seen += sum(ids.size for ids, _, _ in examples)
        if self._seen > MAX_TOKENS:
            raise PackingError(f"{self._seen} tokens are too many for one row: cu_seqlens is int32, so at most {MAX_TOKENS}")

    def add(self, example: _Example, *, like: _Sample | None = None, shared: int = 0) -> _Sample:
        """Append an example whose first `shared` tokens are those of `like`."""
        ids, labels, weights = example
        begin, self.size = self.size, self.size + ids.size - shared
        own = np.arange(begin, self.size)
        path = own if like is None or not shared else np.concatenate([like.path[:shared], own])
        self.samples.append(_Sample(ids, labels, weights, path, shared))
        return self.samples[-1]

    def forget(self) -> None:
        """Share nothing with the examples that were added so far."""
        self._sorted.clear()

    def add_after_prefix(self, example: _Example, *, least: int) -> _Sample:
        """Append an example without the prefix that one before it has, of `least` tokens or more."""
        key = example[0].astype(np.int64).tobytes()
        at = bisect(self._sorted, key, key=lambda each: each[0])
        # In any order of strings, none has a longer prefix in common with one than its neighbours have.
        found = [(_common_tokens(example[0], other.input_ids), other) for _, other in self._sorted[max(0, at - 1) : at + 1]]
        shared, like = max(found, key=lambda each: each[0], default=(0, None))
        sample = self.add(example, like=like, shared=shared) if shared >= least else self.add(example)
        self._sorted.insert(at, (key, sample))
        return sample


def collate_groups(
    groups: Iterable[Sequence[AnyExample]], *, share_prompt: bool = False, share_prefix: bool = False
) -> PackedGroups:
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
        share_prefix: True puts what the first example of a group begins with as one before it does, a system prompt for
            instance, into the row once too, if it is 16 tokens or more. It needs the same attention.

    Raises:
        PackingError: a group is empty or no sequence; or an example is empty, not of integers, or its two lengths differ.


    >>> pair = [([5, 6, 7, 8], [-100, -100, 7, 8]), ([5, 6, 9], [-100, -100, 9])]
    >>> batch = collate_groups([pair], share_prompt=True)
    >>> batch.input_ids.tolist(), batch.position_ids.tolist(), batch.cu_seqlens.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 3, 2], [0, 4, 5])
    >>> batch.rows.tolist(), batch.targets.tolist(), batch.kv_rows.tolist()
    ([1, 2, 1], [7, 8, 9], [0, 1, 2, 3, 0, 1, 4])
    """
    share, across = checked_bool("share_prompt", share_prompt), checked_bool("share_prefix", share_prefix)
    row, sizes = _Row(), []
    for index, group in enumerate(groups):
        members = _members(index, group)
        _refuse_weights(index, members)
        row.expect(members)
        sizes.append(len(members))
        shared = _common_prompt(members) if share else 0
        first = row.add_after_prefix(members[0], least=LEAST_PREFIX) if across else row.add(members[0])
        for member in members[1:]:
            row.add(member, like=first, shared=shared)
    return _packed(row.samples, sizes)


def collate_turns(
    conversations: Iterable[Sequence[AnyExample]], *, share_history: bool = False, share_prefix: bool = False
) -> PackedGroups:
    """Pack conversations that were tokenized once for each learned turn into one flat row.

    The examples of a conversation are its turns, each with all that comes before it, in the form in which the model is asked
    for it; they leave their common history at different tokens. Each example is a completion of the row, the last turn's first.

    Args:
        conversations: Sequences of examples, one for each learned turn of a conversation, in order.
        share_history: False repeats the history, so that every example is a document by itself. True puts into the row once
            what an example has in common with a later turn's, from its first token on, whatever is learned of it. It needs an
            attention that reads `kv_rows`.
        share_prefix: With `share_history`, True shares so with the turns of the conversations before it too, which begin with
            the same system prompt for instance.

    Raises:
        PackingError: as `collate_groups`.


    >>> turns = [([5, 6, 7, 9], [-100, -100, 7, 9]), ([5, 6, 7, 8, 2, 3], [-100] * 4 + [2, 3])]
    >>> batch = collate_turns([turns], share_history=True)
    >>> batch.input_ids.tolist(), batch.position_ids.tolist(), batch.cu_seqlens.tolist()
    ([5, 6, 7, 8, 2, 3, 9], [0, 1, 2, 3, 4, 5, 3], [0, 6, 7])
    >>> batch.rows.tolist(), batch.targets.tolist(), batch.lengths.tolist()
    ([3, 4, 1, 2], [2, 3, 7, 9], [2, 2])
    """
    share, across = checked_bool("share_history", share_history), checked_bool("share_prefix", share_prefix)
    row, sizes = _Row(), []
    for index, turns in enumerate(conversations):
        members = _members(index, turns, what="conversation", each="its turns as a sequence of examples")
        row.expect(members)
        sizes.append(len(members))
        if not across:
            row.forget()
        for turn in reversed(members):
            if share:
                row.add_after_prefix(turn, least=1)
            else:
                row.add(turn)
    return _packed(row.samples, sizes)


_LEAST_SHARE = 32
"""A row of samples is shared where that saves one token in so many."""


def collate_shared(examples: Iterable[AnyExample], *, max_tokens: int | None = None) -> PackedGroups:
    """Pack examples into one flat row, with a prefix that several have in common once.

    Such is a system prompt, with its tools, or a document that several questions are asked about. An example shares what it has
    in common with one before it, from its first token on, whatever is learned of it, if that is 16 tokens or more; where the
    row would become shorter by less than a thirty-second, and has no more than `max_tokens` without that, none is shared. Each
    example is a group by itself. A row with shared prefixes needs an attention that reads `kv_rows`.

    Args:
        examples: As `collate`'s. No examples give an empty row; they are not changed.
        max_tokens: Of a row, as of a plan that counts prefixes once; None for any number.

    Raises:
        PackingError: as `collate`.


    >>> tools = list(range(100, 116))
    >>> batch = collate_shared([([*tools, 5, 6], [-100] * 17 + [6]), ([*tools, 7, 8], [-100] * 17 + [8])])
    >>> batch.input_ids[16:].tolist(), batch.position_ids[16:].tolist(), batch.targets.tolist()
    ([5, 6, 7, 8], [16, 17, 16, 17], [6, 8])
    """
    limit = None if max_tokens is None else checked_integer("max_tokens", max_tokens, 1)
    members = [example_arrays(index, example) for index, example in enumerate(examples)]
    shared, plain = _Row(), _Row()
    shared.expect(members)
    for example in members:
        shared.add_after_prefix(example, least=LEAST_PREFIX)
        plain.add(example)
    worth = shared.size * _LEAST_SHARE <= plain.size * (_LEAST_SHARE - 1) or (limit or plain.size) < plain.size
    return _packed((shared if worth else plain).samples, [1] * len(members))


def _common_tokens(ids: np.ndarray, other: np.ndarray) -> int:
    """Count the first tokens that two samples share.

    The last of `ids` is none of them, so that something is left.
    """
    limit = min(ids.size - 1, other.size)
    same = ids[:limit] == other[:limit]
    return limit if same.all() else int(same.argmin())


def _members(
    index: int,
    group: Sequence[AnyExample],
    *,
    what: str = "group",
    each: str = "the completions of one prompt as a sequence, such as [chosen, rejected]",
) -> list[_Example]:
    try:
        examples = [] if hasattr(group, "input_ids") else list(group)
    except TypeError:
        examples = []
    if not examples:
        raise PackingError(f"{what} {index} is a {type(group).__name__} without examples: give {each}")
    return [example_arrays(f"{place} of {what} {index}", example) for place, example in enumerate(examples)]


def _refuse_weights(index: int, members: list[_Example]) -> None:
    for place, (_, _, weights) in enumerate(members):
        if weights is not None:
            raise PackingError(
                f"example {place} of group {index} has weights, which completions that are compared cannot have; leave them out"
            )


def _common_prompt(members: list[_Example]) -> int:
    """Count the first tokens that all members share.

    None of them is learned, and they are not the whole of any member.
    """
    limit = min(ids.size for ids, _, _ in members) - 1
    if len(members) == 1 or not limit:
        return 0
    first = members[0][0][:limit]
    same = np.ones(limit, dtype=bool)
    for ids, labels, _ in members:
        same[1:] &= labels[1:limit] == IGNORE
        same &= ids[:limit] == first
    return limit if same.all() else int(same.argmin())


def _packed(samples: list[_Sample], sizes: list[int]) -> PackedGroups:
    shared_B = np.array([sample.shared for sample in samples], dtype=np.int64)
    lengths_B = np.array([sample.input_ids.size - sample.shared for sample in samples], dtype=np.int64)
    starts, starts_k = (np.append(0, np.cumsum(each)) for each in (lengths_B, lengths_B + shared_B))
    total = int(starts[-1])
    # Sample after sample, shared tokens too: where each token is in the row, and whether it is learned.
    paths, labels = (concatenated([getattr(sample, name) for sample in samples]) for name in ("path", "labels"))
    labels[starts_k[:-1]] = IGNORE
    learned = np.flatnonzero(labels != IGNORE)
    shares = bool(shared_B.any())
    weighs = any(sample.weights is not None for sample in samples)
    weights = [np.ones(sample.labels.size, np.float32) if sample.weights is None else sample.weights for sample in samples]
    return PackedGroups(
        input_ids=concatenated([sample.input_ids[sample.shared :] for sample in samples]),
        position_ids=np.arange(total) - np.repeat(starts[:-1] - shared_B, lengths_B),
        rows=paths[learned - 1],
        targets=labels[learned],
        lengths=np.diff(np.searchsorted(learned, starts_k)),
        ends=starts[1:] - 1,
        group_sizes=np.array(sizes, dtype=np.int64),
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=int(lengths_B.max()) if lengths_B.size else 0,
        kv_rows=paths if shares else None,
        cu_seqlens_k=starts_k.astype(np.int32) if shares else None,
        max_seqlen_k=int((lengths_B + shared_B).max()) if shares else None,
        weights=np.concatenate(weights)[learned] if weighs else None,
    )
