"""Stores → views."""

import numpy as np
import pytest

from forge_data import DataError, TokenizedExample
from forge_data.viewing._view import chosen_indices, views

from ..viewed import Store, chat, example


def test_a_view_says_what_the_arrays_say(chatml_tokenizer):
    """Ids, mask, segments and texts of a view are the store's sample; together the texts are its text."""
    sample = chat(chatml_tokenizer, ("user", "Hi"), ("assistant", "Ho 日本"))
    (view,) = views(Store([sample], chatml_tokenizer), [0])
    assert view.ids == sample.input_ids.tolist()
    assert view.learned.tolist() == (sample.labels != -100).tolist()
    assert "".join(view.texts) == chatml_tokenizer.decode(sample.input_ids)
    assert [(s.start, s.stop, s.role) for s in view.segments] == [
        (*edges, role) for edges, role in zip(sample.segments.tolist(), sample.roles, strict=True)
    ]
    (run,) = view.runs()
    assert "".join(view.texts[slice(*run)]) == "Ho 日本<|im_end|>"
    assert view.loss_count == sample.loss_count


def test_runs_of_a_part(chatml_tokenizer):
    """Learned stretches are found within any part, edges included."""
    sample = example(chatml_tokenizer, ("a", [1, 2], True), ("b", [3], False), ("c", [4, 5], True))
    (view,) = views(Store([attr_roles(sample)], chatml_tokenizer), [0])
    assert view.runs() == [(0, 2), (3, 5)]
    assert view.runs(1, 4) == [(1, 2), (3, 4)]
    assert view.runs(2, 3) == []


def attr_roles(sample):
    return TokenizedExample(sample.input_ids, sample.labels)


def test_a_sample_without_segments_is_one():
    """A row of token ids is one segment, and without a tokenizer its numbers are shown."""
    sample = TokenizedExample(np.array([5, 6], np.int32), np.array([-100, 6], np.int32))
    (view,) = views(Store([sample]), [0])
    assert [(s.start, s.stop, s.role) for s in view.segments] == [(0, 2, "tokens")]
    assert view.texts == ["[5]", "[6]"]


def test_preferences_know_their_partner(chatml_tokenizer):
    """A view of a preference names which answer it is, and where the other one is."""
    both = [chat(chatml_tokenizer, ("user", "Hi"), ("assistant", answer)) for answer in ("good", "bad")]
    message = [(view.standing, view.partner) for view in views(Store(both, chatml_tokenizer, kind="preference"), [0, 1])]
    assert message == [("chosen", 1), ("rejected", 0)]
    message = [view.standing for view in views(Store(both, chatml_tokenizer, kind="unpaired_preference"), [0, 1])]
    assert message == ["desirable", "undesirable"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [(None, [0, 1]), (2, [2]), (-1, [3]), (slice(1, None, 2), [1, 3]), ([3, 0], [3, 0]), (np.array([1]), [1]), ((), [])],
)
def test_chosen_indices(asked, given):
    """A number, a slice, numbers in any order, or None for the first few give indices from the front."""
    assert chosen_indices(Store([None] * 4), asked, 2) == given


@pytest.mark.parametrize("asked", [4, [0, -5], [1.5], ["0"], True, slice(5, 2), slice(9, None), slice(3, 1, 1)])
def test_indices_that_are_none(asked):
    """Indices that the store does not have, or that are not whole numbers, are one clear error."""
    with pytest.raises(DataError, match="no sample|whole number"):
        chosen_indices(Store([None] * 4), asked, 2)
