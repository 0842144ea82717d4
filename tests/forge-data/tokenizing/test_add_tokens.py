"""Adding tokens to a tokenizer: ids, tokens that are there already, and tokens that cannot be."""

import copy

import pytest

from forge_data import TokenizerError, add_tokens


@pytest.fixture
def tokenizer(chatml_tokenizer):
    """A tokenizer of this test's own: others share the one that it is a copy of."""
    return copy.deepcopy(chatml_tokenizer)


def test_each_string_becomes_one_token(tokenizer):
    """New tokens get the ids after the last one, ordinary ones first, wherever they stand; special ones are not decoded."""
    size = len(tokenizer)
    added = add_tokens(tokenizer, ["<very>", "two words"], special=["<mood>"])
    assert added.new == added.ids == {"<very>": size, "two words": size + 1, "<mood>": size + 2}
    ids = tokenizer("a<very>b two words<mood>", add_special_tokens=False)["input_ids"]
    assert [number for number in ids if number >= size] == [size, size + 1, size + 2]
    assert "<very>" in tokenizer.decode(ids, skip_special_tokens=True)
    assert "<mood>" not in tokenizer.decode(ids, skip_special_tokens=True)


def test_a_token_that_is_there_keeps_its_id(tokenizer):
    """Tokens that the tokenizer has already are reported as known, get no second id, and adding them twice changes nothing."""
    add_tokens(tokenizer, ["<very>"])
    before = tokenizer.get_vocab()
    added = add_tokens(tokenizer, ["<very>"], special=[tokenizer.eos_token])
    assert added.new == {}
    assert added.known == ("<very>", tokenizer.eos_token)
    assert tokenizer.get_vocab() == before


def test_a_token_that_the_normalizer_changes_is_refused(tokenizer):
    """Where a normalizer makes several tokens of the text, the error shows which; a special token is not normalised."""
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("*", "")
    with pytest.raises(TokenizerError, match=r"'\*' cannot be added: .* reads it as 0 tokens"):
        add_tokens(tokenizer, ["*"])
    assert add_tokens(tokenizer, special=["**"]).new
