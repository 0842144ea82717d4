"""White space that a tokenizer trims from its offsets is put back."""

import itertools

import pytest
from hypothesis import given, strategies as st

from forge_data.tokenizing._batch_tokenizer import BatchTokenizer

TEXT = st.text(st.sampled_from("a bé\n\t.🙂"), max_size=20)


@pytest.mark.parametrize("trim_offsets", [True, False])
@given(text=TEXT)
def test_every_character_has_its_token(tokenizers, trim_offsets, text):
    """Tokens tile the text: each begins where the one before it ends (or shares its character), blanks included."""
    ids, offsets, sizes = BatchTokenizer(tokenizers["chatml", trim_offsets])([text], special=False)
    assert [len(ids)] == [len(offsets)] == sizes
    covered = {place for begin, end in offsets for place in range(begin, end)}
    assert covered == set(range(len(text)))
    assert all(after[0] in {before[1], before[0], before[1] - 1} for before, after in itertools.pairwise(offsets))


def test_trimming_and_not_agree(tokenizers):
    """The same text has the same offsets whether the tokenizer trims or not."""
    text = "a  \n   b c\n\n  d  "
    _, one, _ = BatchTokenizer(tokenizers["chatml", True])([text], special=False)
    _, two, _ = BatchTokenizer(tokenizers["chatml", False])([text], special=False)
    assert one.tolist() == two.tolist()
