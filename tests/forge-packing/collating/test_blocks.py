"""split_documents: every token once, none padded, and the count of loss terms."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import PackingError, collate, plan, split_documents

DOCUMENTS = st.lists(st.integers(1, 40) | st.integers(1, 3), min_size=1, max_size=25)
SIZES = st.integers(2, 16)


def naive(lengths, block_size):
    """The blocks, document by document and piece by piece."""
    blocks, room = [[]], block_size
    for document, length in enumerate(lengths):
        start = 0
        while True:
            stop = min(start + room, length)
            if stop == length or stop - start >= 2:
                blocks[-1].append((document, start, stop))
                room -= stop - start
                if stop == length:
                    break
                start = stop - 1
            blocks.append([])
            room = block_size
    return [block for block in blocks if block]


@settings(deadline=None, max_examples=300)
@given(DOCUMENTS, SIZES)
def test_equals_the_naive_cut(lengths, block_size):
    """The bisecting, dividing version makes the very blocks of the naive one."""
    assert list(split_documents(lengths, block_size)) == naive(lengths, block_size)


@settings(deadline=None, max_examples=1000)
@given(DOCUMENTS, SIZES)
def test_every_token_is_learned_once(lengths, block_size):
    """Each token but a document's first is the target of one loss term, in its own document only; the first is there."""
    blocks = split_documents(lengths, block_size)
    targets = [(d, t) for block in blocks for d, start, stop in block for t in range(start + 1, stop)]
    assert targets == [(d, t) for d, length in enumerate(lengths) for t in range(1, length)]
    firsts = [d for block in blocks for d, start, _ in block if start == 0]
    assert firsts == list(range(len(lengths)))
    assert blocks.loss_counts.sum() == len(targets) == sum(lengths) - len(lengths)


@settings(deadline=None, max_examples=300)
@given(DOCUMENTS, SIZES)
def test_blocks_are_full(lengths, block_size):
    """No block is over its size; all but the last are full, or one short where that token could only be a context."""
    blocks = split_documents(lengths, block_size)
    sizes = blocks.lengths.tolist()
    assert sizes == [sum(stop - start for _, start, stop in block) for block in blocks]
    assert all(block_size - 1 <= size <= block_size for size in sizes[:-1])
    assert 1 <= sizes[-1] <= block_size


@settings(deadline=None, max_examples=1000)
@given(DOCUMENTS, SIZES)
def test_one_stream(lengths, block_size):
    """Across documents: each token but the very first is a target once; all blocks but the last are full."""
    blocks = split_documents(lengths, block_size, cross_documents=True)
    stream = [(d, t) for d, length in enumerate(lengths) for t in range(length)]
    tokens = [[(d, t) for d, start, stop in block for t in range(start, stop)] for block in blocks]
    assert tokens[0][:1] + [token for block in tokens for token in block[1:]] == stream
    assert all(before[-1] == after[0] for before, after in pairwise(tokens))
    assert all(len(block) == block_size for block in tokens[:-1])
    assert blocks.lengths.tolist() == [len(block) for block in tokens]
    assert blocks.loss_counts.sum() == len(stream) - 1


def test_a_plan_and_collate_count_the_same():
    """Planned and collated, the learned labels of a step are the normaliser that the plan has for it."""
    documents = [list(range(100 * d, 100 * d + length)) for d, length in enumerate([5, 1, 17, 2, 9, 30, 4])]
    blocks = split_documents([len(document) for document in documents], 8)
    made = plan(blocks.lengths, batch_size=3, max_tokens=16, loss_counts=blocks.loss_counts)
    learned = []
    for step in range(made.num_steps):
        count = 0
        for row in made.micro_batches(step):
            spans = [span for index in row for span in blocks[int(index)]]
            batch = collate([(documents[d][start:stop],) * 2 for d, start, stop in spans])
            count += int((batch.labels != -100).sum())
            learned += batch.labels[batch.labels != -100].tolist()
        assert count == made.loss_tokens[step]
    assert sorted(learned) == sorted(token for document in documents for token in document[1:])


def test_a_sequence():
    """Blocks are asked for by place, from the end, in slices, and print in one line."""
    blocks = split_documents([5, 2, 4], 4)
    assert len(blocks) == 3
    assert blocks[0] == [(0, 0, 4)]
    assert blocks[-1] == [(2, 0, 4)]
    assert blocks[1:] == [[(0, 3, 5), (1, 0, 2)], [(2, 0, 4)]]
    assert repr(blocks) == "Blocks(3 blocks of 4 spans)"
    with pytest.raises(IndexError):
        blocks[3]


def test_a_very_long_document():
    """A document of a million blocks is cut by arithmetic, not one by one."""
    blocks = split_documents([10**6 * 15 + 1], 16)
    assert len(blocks) == 10**6
    assert blocks[-1] == [(0, (10**6 - 1) * 15, 10**6 * 15 + 1)]
    assert blocks.loss_counts.sum() == 10**6 * 15


@pytest.mark.parametrize(
    ("lengths", "block_size", "message"),
    [
        ([3], 1, "block_size must be an integer from 2 to 2147483647, got 1"),
        ([3], 2.5, r"block_size must be .* got 2.5 \(float\)"),
        ([], 8, "lengths is empty"),
        ([4, 0], 8, "at least 1 token, found 0 at index 1"),
        ([4, np.nan], 8, "lengths must be integers"),
        ([2**62] * 4, 2**20, f"1.84e[+]19 tokens in all, more than 4.5e[+]15; the longest, {2**62} tokens, is at index 0"),
    ],
)
def test_refuses(lengths, block_size, message):
    """Sizes and lengths that nothing can be made of are named."""
    with pytest.raises(PackingError, match=message):
        split_documents(lengths, block_size)
