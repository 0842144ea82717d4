"""What is longer than `max_seq_len` is dropped, cut, split or refused, and every token is counted."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_data import BadPairError, DataError, TokenizedExample
from forge_data._options import ON_OVERFLOW, Options
from forge_data.formats._samples import Encoded
from forge_data.tokenizing import _overflow
from forge_data.tokenizing._overflow import piece


def fit(place, examples, options, *, pair=None):
    """Fit the examples of one row; two are a preference unless it is said otherwise."""
    return _overflow.fit(place, Encoded(examples, pair=len(examples) > 1 if pair is None else pair), options)


def example(mask, roles=None, first=1):
    """Make an example whose token i is i + first, learned by the mask, one segment a run of equal roles."""
    roles = roles or "u" * len(mask)
    starts = [i for i in range(len(mask)) if i == 0 or roles[i] != roles[i - 1]]
    segments = np.array(list(zip(starts, [*starts[1:], len(mask)], strict=True)), dtype=np.int32).reshape(-1, 2)
    names = {"u": "user", "a": "assistant", "s": "system"}
    ids = np.arange(first, len(mask) + first, dtype=np.int32)
    return TokenizedExample.from_mask(ids, np.array(mask, dtype=bool), segments, tuple(names[roles[i]] for i in starts))


def options(limit, on_overflow="drop"):
    return Options(max_seq_len=limit, on_overflow=on_overflow)


@pytest.mark.parametrize("on_overflow", ON_OVERFLOW)
def test_exactly_the_limit_fits(on_overflow):
    """A row of exactly max_seq_len tokens is kept as it is, under every option."""
    whole = example([0, 1, 1])
    assert fit("r", (whole,), options(3, on_overflow)) == ((whole,), None, {})
    assert fit("r", (whole,), options(2, "drop")).reason == "longer_than_max_seq_len"


def test_drop():
    """Dropped rows count with all their tokens; one without a learned token by that reason, at any length."""
    assert fit("r", (example([0, 1, 1]),), options(2)) == ((), "longer_than_max_seq_len", {"longer_than_max_seq_len": 3})
    assert fit("r", (example([1, 0, 0]),), options(2)) == ((), "no_trained_token", {"no_trained_token": 3})


def test_truncate():
    """The first max_seq_len tokens stay, with their segments; a rest without learned tokens is dropped by that reason."""
    (kept,), reason, lost = fit("r", (example([0, 0, 1, 1, 1], "suuaa"),), options(4, "truncate"))
    assert reason is None
    assert lost == {"truncated": 1}
    assert kept.input_ids.tolist() == [1, 2, 3, 4]
    assert kept.labels.tolist() == [-100, -100, 3, 4]
    assert kept.segments.tolist() == [[0, 1], [1, 3], [3, 4]]
    assert kept.roles == ("system", "user", "assistant")
    nothing = fit("r", (example([0, 0, 0, 1]),), options(3, "truncate"))
    assert nothing == ((), "no_trained_token_within_max_seq_len", {"no_trained_token_within_max_seq_len": 4})


def test_split():
    """Pieces are consecutive; those without a learned token are left out and counted."""
    kept, reason, lost = fit("r", (example([0, 1, 1, 0, 0, 0, 0, 1], "uaauuuua"),), options(3, "split"))
    assert reason is None
    assert [each.input_ids.tolist() for each in kept] == [[1, 2, 3], [7, 8]]
    assert [each.roles for each in kept] == [("user", "assistant"), ("user", "assistant")]
    assert lost == {"piece_without_trained_token": 3}
    # The first label of a sample never counts, so a piece that learns only its first token learns nothing.
    assert fit("r", (example([0, 0, 0, 1]),), options(3, "split")).reason == "no_trained_token_within_max_seq_len"


def test_error():
    """The first row that is too long is refused, with its length and what to do."""
    with pytest.raises(
        DataError, match=r"train.jsonl:3: 4 tokens, and `max_seq_len` is 3; raise it, shorten the row, or say what"
    ):
        fit("train.jsonl:3", (example([0, 1, 1, 1]),), options(3, "error"))


def test_both_sides_of_a_preference():
    """Both sides stay or both are dropped, and tokens of both count; a pair cannot be split."""
    short, long, untrained = example([0, 1]), example([0, 1, 1, 1]), example([1, 0, 0])
    assert fit("r", (short, long), options(3)) == ((), "longer_than_max_seq_len", {"longer_than_max_seq_len": 6})
    assert fit("r", (long, untrained), options(9)) == ((), "no_trained_token", {"no_trained_token": 7})
    kept, _, lost = fit("r", (short, long), options(3, "truncate"))
    assert [len(each) for each in kept] == [2, 3]
    assert lost == {"truncated": 1}
    with pytest.raises(DataError, match="r: a preference of which one side is longer than `max_seq_len`"):
        fit("r", (short, long), options(3, "split"))


def test_two_sides_of_the_same_tokens():
    """A pair of equal tokens prefers nothing, also if only the limit makes them equal."""
    with pytest.raises(BadPairError, match="r: field rejected is the same as chosen, token for token") as caught:
        fit("r", (example([0, 1]), example([0, 1])), options(1))
    assert caught.value.reason == "same_answers"
    one, other = example([0, 1, 1]), example([0, 1, 1, 1])
    with pytest.raises(
        BadPairError, match="r: field rejected is the same as chosen in its first 2 tokens, and `max_"
    ) as caught:
        fit("r", (one, other), options(2, "truncate"))
    assert caught.value.reason == "same_answers_within_max_seq_len"
    assert fit("r", (one, other), options(2)).reason == "longer_than_max_seq_len"
    assert [len(side) for side in fit("r", (one, other), options(4, "truncate")).kept] == [3, 4]


def test_turns_stay_one_by_one():
    """Of a conversation's turns in samples of their own, one that is too long is lost and the others stay."""
    short, long = example([0, 1]), example([0, 1, 1, 1], first=9)
    assert fit("r", (short, long), options(3), pair=False) == ((short,), None, {"longer_than_max_seq_len": 4})
    gone = fit("r", (long, long), options(3), pair=False)
    assert gone == ((), "longer_than_max_seq_len", {"longer_than_max_seq_len": 8})
    assert len(fit("r", (short, long), options(3, "split"), pair=False).kept) == 2


@given(
    sides=st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=2),
    limit=st.integers(1, 8) | st.none(),
    on_overflow=st.sampled_from(ON_OVERFLOW),
    pair=st.booleans(),
)
def test_every_token_is_booked(sides, limit, on_overflow, pair):
    """Tokens kept plus tokens lost are all tokens; samples fit, learn something, and are pieces of the row."""
    examples = tuple(example(mask, first=1 + 30 * side) for side, mask in enumerate(sides))
    try:
        kept, reason, lost = fit("r", examples, options(limit, on_overflow), pair=pair and len(sides) > 1)
    except DataError:
        assert on_overflow in ("error", "split")
        return
    assert sum(map(len, kept)) + sum(lost.values()) == sum(map(len, examples))
    assert bool(kept) == (reason is None)
    assert all(each.loss_count and (limit is None or len(each) <= limit) for each in kept)
    texts = [bytes(whole.input_ids.tolist()) for whole in examples]
    assert all(any(bytes(each.input_ids.tolist()) in text for text in texts) for each in kept)


@given(st.text("usa", min_size=1, max_size=20), st.data())
def test_pieces_keep_their_segments(roles, data):
    """Each token of a piece is in a segment of the role that it had."""
    start = data.draw(st.integers(0, len(roles) - 1))
    stop = data.draw(st.integers(start + 1, len(roles)))
    cut = piece(example([1] * len(roles), roles), start, stop)
    seen = [role for (a, b), role in zip(cut.segments, cut.roles, strict=True) for _ in range(a, b)]
    assert "".join(role[0] for role in seen) == roles[start:stop]
    assert cut.segments[0, 0] == 0
    assert cut.segments[-1, 1] == len(cut)
    assert cut.segments.dtype == np.int32
