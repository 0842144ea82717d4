"""How a packed row is cut over ranks: every token has one rank, and its queries see what they see in the whole row."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from forge_dist.context._cut import chunks, cut_row


def seen_in_the_row(ends, key_ends, kv_rows):
    """position → the positions that its query sees: all of its document's keys but those of later queries."""
    seen = {}
    for document, (start, stop) in enumerate(pairwise(ends)):
        keys = list(range(start, stop)) if kv_rows is None else kv_rows[key_ends[document] : key_ends[document + 1]]
        for position in range(start, stop):
            seen[position] = keys[: len(keys) - (stop - 1 - position)]
    return seen


def seen_on_a_rank(cut):
    """The same from a rank's cut: each piece's last query is at its last key."""
    places = {int(place): position for position, place in enumerate(cut.order)}
    keys = [places[int(place)] for part in cut.seen for place in part]
    found = {}
    for (start, stop), (first, last) in zip(pairwise(cut.queries), pairwise(cut.keys), strict=True):
        mine = keys[first:last]
        for number in range(start, stop):
            found[int(cut.mine[number])] = mine[: len(mine) - (stop - 1 - number)]
    return found


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), ranks=st.integers(1, 4))
def test_every_query_sees_what_it_sees_in_the_whole_row(lengths, ranks):
    """Whatever the documents and wherever the cuts: no token is left out, none has two ranks, none sees another document."""
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] < 2 * ranks:
        ends.append(2 * ranks)
    found = {}
    for rank in range(ranks):
        cut = cut_row(ends, ranks=ranks, rank=rank)
        part = seen_on_a_rank(cut)
        assert not part.keys() & found.keys()
        assert 0 < len(cut.mine) <= cut.longest
        assert cut.longest_queries <= cut.longest_keys
        found |= part
    assert found == seen_in_the_row(ends, None, None)


@given(
    prompts=st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3)), min_size=1, max_size=3),
    ranks=st.integers(1, 3),
)
def test_completions_that_share_a_prompt(prompts, ranks):
    """What `kv_rows` names is what each query sees, also where a cut divides a prompt or a completion."""
    ends, key_ends, rows = [0], [0], []
    for prompt, completions in prompts:
        begin = ends[-1]
        for number, length in enumerate(completions):
            start = ends[-1]
            own = (prompt if number == 0 else 0) + length
            rows += [*(range(begin, begin + prompt) if number else ()), *range(start, start + own)]
            ends.append(start + own)
            key_ends.append(len(rows))
    while ends[-1] < 2 * ranks:
        rows.append(ends[-1])
        ends.append(ends[-1] + 1)
        key_ends.append(len(rows))
    found = {}
    for rank in range(ranks):
        found |= seen_on_a_rank(cut_row(ends, ranks=ranks, rank=rank, key_ends=key_ends, kv_rows=torch.tensor(rows)))
    assert found == seen_in_the_row(ends, key_ends, rows)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_equal_work(ranks):
    """Of one long document every rank has as many pairs of query and key as the mean, within two of a hundred."""
    tokens = 1600
    work = [sum(position + 1 for chunk in chunks(tokens, ranks, rank) for position in chunk) for rank in range(ranks)]
    assert max(work) <= 1.02 * sum(work) / ranks
