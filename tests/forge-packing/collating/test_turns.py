"""collate_turns: one flat row, from which each turn can be read back with all before it, its history there once or repeated."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import PackingError, collate_groups, collate_turns

from .test_groups import sight

TOKENS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([-100, -100, 1, 7])), max_size=5)


@st.composite
def conversations(draw):
    """Conversations of 1 to 5 turns: each leaves a growing history somewhere, with few different tokens."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        history, turns = [], []
        for _ in range(draw(st.integers(1, 5))):
            history = history[: draw(st.integers(0, 9)) or None] + draw(TOKENS)
            turn = history + draw(TOKENS) or [(1, 1)]
            turns.append(([token for token, _ in turn], [label for _, label in turn]))
        found.append(turns)
    return found


def in_order(drawn):
    """Examples in the order of the row: the last turn of a conversation first."""
    return [turn for turns in drawn for turn in reversed(turns)]


@settings(deadline=None, max_examples=200)
@given(conversations(), st.booleans())
def test_every_turn_can_be_read_back(drawn, share):
    """What a segment sees is its turn's whole example, at positions 0, 1, ...; its learned tokens follow from what it sees."""
    batch = collate_turns(drawn, share_history=share)
    seen, rows, targets = sight(batch), [], []
    assert batch.group_sizes.tolist() == [len(turns) for turns in drawn]
    for (ids, labels), own, (start, stop) in zip(in_order(drawn), seen, pairwise(batch.cu_seqlens.tolist()), strict=True):
        assert batch.input_ids[own].tolist() == ids
        assert batch.position_ids[own].tolist() == list(range(len(ids)))
        assert own[start - stop :].tolist() == list(range(start, stop))
        learned = [at for at in range(1, len(ids)) if labels[at] != -100]
        rows += [own[at - 1] for at in learned]
        targets += [labels[at] for at in learned]
    assert batch.rows.tolist() == rows
    assert batch.targets.tolist() == targets
    assert batch.ends.tolist() == [int(own[-1]) for own in seen]


@settings(deadline=None, max_examples=200)
@given(conversations(), st.booleans())
def test_what_turns_have_in_common_is_there_once(drawn, across):
    """No two turns of a conversation, or with `share_prefix` of any, begin alike in two places, but for a last token."""
    batch = collate_turns(drawn, share_history=True, share_prefix=across)
    seen, groups = sight(batch), np.repeat(np.arange(len(drawn)), [len(turns) for turns in drawn])
    for one in range(len(seen)):
        for other in range(one):
            if groups[one] != groups[other] and not across:
                assert not set(seen[one]) & set(seen[other])
                continue
            ids, before = batch.input_ids[seen[one]], batch.input_ids[seen[other]]
            size = min(len(ids) - 1, len(before))
            alike = size if (ids[:size] == before[:size]).all() else int((ids[:size] == before[:size]).argmin())
            shared = (seen[one][:size] == seen[other][:size]).sum()
            # A third turn that both follow may share more with one of them.
            assert shared <= alike
            assert shared == alike or any(
                (seen[one][:alike] == seen[third][:alike]).all() for third in range(one) if len(seen[third]) >= alike
            )


@settings(deadline=None)
@given(conversations())
def test_without_sharing_it_is_collate_groups(drawn):
    """The row of the same examples as groups, last turns first."""
    batch, plain = collate_turns(drawn), collate_groups([turns[::-1] for turns in drawn])
    for name in ("input_ids", "position_ids", "rows", "targets", "lengths", "ends", "group_sizes", "cu_seqlens"):
        assert np.array_equal(getattr(batch, name), getattr(plain, name))
    assert batch.kv_rows is None


def test_a_turn_learns_tokens_of_the_shared_history():
    """Where an inner turn stands in the history as it is learned, but for its end, its own segment is that end alone."""
    history = [1, 2, 5, 6]
    turns = [([*history, 9], [-100, -100, 5, 6, 9]), ([*history, 3, 4, 7], [-100] * 6 + [7])]
    batch = collate_turns([turns], share_history=True)
    assert batch.input_ids.tolist() == [1, 2, 5, 6, 3, 4, 7, 9]
    assert (batch.rows.tolist(), batch.targets.tolist()) == ([5, 1, 2, 3], [7, 5, 6, 9])


def test_a_conversation_without_turns():
    """Is refused by its number."""
    with pytest.raises(PackingError, match="conversation 1 is a list without examples: give its turns"):
        collate_turns([[([1, 2], [1, 2])], []])
