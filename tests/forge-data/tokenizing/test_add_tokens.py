"""Adding tokens to a tokenizer: ids, tokens that are there already, and tokens that cannot be."""

import pytest

from forge_data import TokenizerError, add_tokens


def test_each_string_becomes_one_token(chatml_tokenizer):
    """New tokens get the ids after the last one, ordinary ones first, wherever they stand; special ones are not decoded."""
    size = len(chatml_tokenizer)
    added = add_tokens(chatml_tokenizer, ["<very>", "two words"], special=["<mood>"])
    assert added.new == added.ids == {"<very>": size, "two words": size + 1, "<mood>": size + 2}
    ids = chatml_tokenizer("a<very>b two words<mood>", add_special_tokens=False)["input_ids"]
    assert [number for number in ids if number >= size] == [size, size + 1, size + 2]
    assert "<very>" in chatml_tokenizer.decode(ids, skip_special_tokens=True)
    assert "<mood>" not in chatml_tokenizer.decode(ids, skip_special_tokens=True)


def test_a_token_that_is_there_keeps_its_id(chatml_tokenizer):
    """Tokens that the tokenizer has already are reported as known, get no second id, and adding them twice changes nothing."""
    add_tokens(chatml_tokenizer, ["<very>"])
    before = chatml_tokenizer.get_vocab()
    added = add_tokens(chatml_tokenizer, ["<very>"], special=[chatml_tokenizer.eos_token])
    assert added.new == {}
    assert added.known == ("<very>", chatml_tokenizer.eos_token)
    assert chatml_tokenizer.get_vocab() == before


def test_a_token_that_the_normalizer_changes_is_refused(chatml_tokenizer):
    """Where a normalizer makes several tokens of the text, the error shows which; a special token is not normalised."""
    from tokenizers import normalizers

    chatml_tokenizer.backend_tokenizer.normalizer = normalizers.Replace("*", "")
    with pytest.raises(TokenizerError, match=r"'\*' cannot be added: .* reads it as 0 tokens"):
        add_tokens(chatml_tokenizer, ["*"])
    assert add_tokens(chatml_tokenizer, special=["**"]).new
