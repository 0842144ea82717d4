"""find_prefixes: what samples begin with alike, beside a search over all of them."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import PackingError, collate_shared, find_prefixes, plan

HEADER, TOOLS, OTHER = (np.random.default_rng(seed).integers(0, 1000, size) for seed, size in ((0, 20), (1, 150), (2, 70)))


def flat(samples):
    return np.concatenate([np.zeros(0, dtype=np.int32), *samples]), [len(each) for each in samples]


def check(samples, found):
    """All samples with a prefix have its tokens, and one more."""
    of, tokens = found
    for number, size in enumerate(tokens.tolist()):
        members = [np.asarray(samples[at]) for at in np.flatnonzero(of == number)]
        assert len({member[:size].tobytes() for member in members}) == 1
        assert len(members) >= 2
        assert size >= 16
        assert min(map(len, members)) > size


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=80)), min_size=1, max_size=60))
def test_samples_have_their_prefix(drawn):
    """Whatever they are made of: two headers, one of which begins the other's samples, or none; own tokens that repeat."""
    starts = (HEADER[:0], HEADER, np.append(HEADER, TOOLS), OTHER)
    samples = [np.append(starts[which], own) for which, own in drawn]
    found = find_prefixes(*flat(samples))
    if found is not None:
        check(samples, found)


def test_the_longest_of_each():
    """Two system prompts behind one header, one of which a few leave early, and samples without: to the token."""
    random = np.random.default_rng(3)
    own = [random.integers(1000, 2000, size) for size in random.integers(5, 90, 300)]
    starts = [np.append(HEADER, TOOLS), np.append(HEADER, OTHER), HEADER[:0], np.append(HEADER, TOOLS[:149])]
    which = random.choice(4, 300, p=[0.5, 0.25, 0.2, 0.05])
    samples = [np.append(starts[at], each) for at, each in zip(which, own, strict=True)]
    of, tokens = find_prefixes(*flat(samples))
    check(samples, (of, tokens))
    assert sorted(tokens.tolist()) in ([20 + 70, 20 + 149], [20 + 70, 20 + 150])
    for kind in (0, 1):
        assert len(set(of[which == kind].tolist())) == 1
    assert set(of[which == 2].tolist()) == {-1}


def test_a_prefix_of_all_rather_than_longer_ones_of_some():
    """What 300 samples have is counted whole, 100 tokens and not 64, beside two longer prefixes of most of them."""
    random = np.random.default_rng(5)
    start, longer = random.integers(0, 1000, 100), random.integers(0, 1000, (2, 40))
    own = [random.integers(0, 1000, 20) for _ in range(300)]
    samples = [np.concatenate([start, *([longer[at % 2]] if at % 10 < 6 else []), each]) for at, each in enumerate(own)]
    of, tokens = find_prefixes(*flat(samples))
    assert of.tolist() == [0] * 300
    assert tokens.tolist() == [100]


def test_samples_that_end_early():
    """Samples that are shorter than what they are compared over, the last of all too, keep one token of their own."""
    lengths = [150, 16, 17, 18, 25, 31, 40, 150, 20]
    samples = [np.append(TOOLS[: size - 1], [1000 + at]) for at, size in enumerate(lengths)]
    of, tokens = find_prefixes(*flat([*samples[:7], samples[7], samples[8]]))
    check(samples, (of, tokens))
    assert of[[0, 7]].tolist() == [0, 0]
    at_the_end = [np.append(HEADER, [at]) for at in range(9)]
    assert find_prefixes(*flat([np.append(HEADER, OTHER), *at_the_end]))[1].tolist() == [20]


def test_a_view_in_another_order():
    """`starts` name samples in any order; equal samples share all but their last token."""
    ids, lengths = flat([np.append(TOOLS, [1, 2, 3]), [7], np.append(TOOLS, [4]), TOOLS])
    of, tokens = find_prefixes(ids, [lengths[2], lengths[0]], starts=[154, 0])
    assert of.tolist() == [0, 0]
    assert tokens.tolist() == [150]
    same, size = find_prefixes(*flat([TOOLS, TOOLS, TOOLS]))
    assert same.tolist() == [0, 0, 0]
    assert size.tolist() == [149]


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [TOOLS],
        [TOOLS, OTHER],
        [np.append(HEADER[:15], [at]) for at in range(9)],
        [np.append(HEADER, np.arange(at, at + 900)) for at in range(9)],
    ],
)
def test_nothing_in_common(samples):
    """Nothing, less than 16 tokens, or less than a thirty-second of all."""
    assert find_prefixes(*flat(samples)) is None


def test_a_plan_with_them_keeps_to_its_tokens():
    """Rows that `collate_shared` makes of a plan's micro-batches have at most as many tokens as it counts."""
    random = np.random.default_rng(4)
    starts = [HEADER[:0], HEADER, np.append(HEADER, TOOLS), OTHER]
    samples = [np.append(starts[at % 4], random.integers(0, 9, 1 + at % 50)) for at in range(200)]
    ids, lengths = flat(samples)
    prefixes, tokens = find_prefixes(ids, lengths)
    made = plan(lengths, batch_size=40, max_tokens=256, world_size=2, prefixes=prefixes, prefix_tokens=tokens)
    rows = [m for step in range(made.num_steps) for rank in (0, 1) for m in made.micro_batches(step, rank)]
    for row in rows:
        packed = collate_shared([(samples[at], samples[at]) for at in row], max_tokens=256)
        assert len(packed.input_ids) <= made.places(row) <= 256
    assert len(rows) < 0.7 * sum(2 * len(made.alone().micro_batches(step)) for step in range(made.num_steps))


def test_a_full_row_is_shared_whatever_it_saves():
    """Ten samples behind 16 tokens save less than a thirty-second, and are too many tokens without that."""
    samples = [np.append(HEADER[:16], np.arange(at, at + 700)) for at in range(0, 7000, 700)]
    pairs = [(each, each) for each in samples]
    assert len(collate_shared(pairs).input_ids) == 7160
    assert len(collate_shared(pairs, max_tokens=7100).input_ids) == 7016


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2]], [2]), "flat sequence of integers"),
        (([0.5], [1]), "flat sequence of integers"),
        (([1, 2], [3]), "sample 0 is 3 tokens from 0, which are not among 2 ids"),
        (([1, 2], [1, 0]), "sample 1 is 0 tokens"),
    ],
)
def test_refused(arguments, message):
    """Samples that are not there."""
    with pytest.raises(PackingError, match=message):
        find_prefixes(*arguments)


def test_refused_starts():
    """One for each sample."""
    with pytest.raises(PackingError, match="starts must have one entry a sample: got 1 for 2 lengths"):
        find_prefixes([1, 2], [1, 1], starts=[0])
