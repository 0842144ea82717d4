"""Two tokenizers' spans of one text: whatever their vocabularies and templates, both sides spell the same."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_data import shared_tokens
from forge_data.aligning._align import align
from forge_data.aligning._spelling import Spelling

from ..families import FAMILIES

IGNORED = -100


class Words:
    """Spelling of a made-up vocabulary, in which ids are words of a list."""

    special = frozenset()

    def __init__(self, words):
        self.words = words

    def of(self, ids):
        return [self.words[at] for at in np.asarray(ids).tolist()]


def cut(text, places):
    """Return the words of a text that is cut at these places, and their ids."""
    bounds = [0, *sorted({p for p in places if 0 < p < len(text)}), len(text)]
    words = [text[a:b] for a, b in pairwise(bounds) if b > a]
    return Words(words), np.arange(len(words), dtype=np.int32), set(bounds[1:])


@given(
    text=st.binary(min_size=1, max_size=20).filter(lambda text: text == text.strip(b" \t\r\n")),
    ours=st.lists(st.integers(1, 19), max_size=8),
    theirs=st.lists(st.integers(1, 19), max_size=8),
    lead=st.integers(1, 3),
)
def test_cuts_wherever_both_do(text, ours, theirs, lead):
    """Spans end at each place where both texts are cut, and nowhere else; the prompt before is no part of them."""
    own, ids, ends = cut(text, ours)
    other, other_ids, other_ends = cut(text, theirs)
    samples = []
    for words, tokens in ((own, ids), (other, other_ids)):
        words.words.append(b"prompt")
        prompt = np.full(lead, len(words.words) - 1, np.int32)
        whole = np.concatenate([prompt, tokens])
        samples.append((whole, np.where(np.arange(len(whole)) < lead, IGNORED, whole)))
    (found,) = align(samples[:1], samples[1:], own, other)
    spelled = [b"".join(own.of(samples[0][0][a:b])) for a, b, _, _ in found.spans]
    assert spelled == [b"".join(other.of(found.ids[c:d])) for _, _, c, d in found.spans]
    assert np.cumsum([len(each) for each in spelled]).tolist() == sorted(ends & other_ends)
    assert b"".join(spelled) == text
    assert np.array_equal(found.ids, samples[1][0])
    assert found.starts.tolist() == [1] + [0] * (len(found.ids) - 1)


def test_texts_that_differ_are_compared_from_both_ends():
    """What stands in one alone is passed over, at any place; other numbers of runs are not compared at all."""
    own = Words([b"p", b"think ", b"ab", b"cd", b"ef", b" x", b"end"])
    other = Words([b"p", b"a", b"b", b"cdef", b" y", b"END"])
    own.special, other.special = frozenset({6}), frozenset({5})

    def of(words, ids):
        tokens = np.array([0, *ids], np.int32)
        return tokens, np.where(tokens == 0, IGNORED, tokens)

    (found,) = align([of(own, [1, 2, 3, 4, 6])], [of(other, [1, 2, 3, 5])], own, other)
    assert found.spans.tolist() == [[2, 3, 1, 3], [3, 5, 3, 4], [5, 6, 4, 5]]
    assert found.ends == [(6, 5)]
    (found,) = align([of(own, [2, 3, 4, 5, 6])], [of(other, [1, 2, 3, 4, 5])], own, other)
    assert found.spans.tolist() == [[1, 2, 1, 3], [2, 4, 3, 4]]
    (found,) = align([of(own, [2, 1, 3, 4])], [of(other, [1, 2, 3])], own, other)
    assert found.spans.tolist() == [[1, 2, 1, 3], [3, 5, 3, 4]]
    (none,) = align([of(own, [2])], [of(other, [1, 0, 1])], own, other)
    assert (len(none.spans), len(none.ids)) == (0, 0)


def test_turns_apart_on_one_side():
    """A row that is a sample a turn on one side and one sample on the other is aligned turn by turn, both ways."""
    words = Words([b"p", b"a", b"b", b"q", b"c"])
    whole = np.array([0, 1, 2, 3, 4], np.int32), np.array([IGNORED, 1, 2, IGNORED, 4], np.int32)
    first = np.array([0, 1, 2], np.int32), np.array([IGNORED, 1, 2], np.int32)
    last = np.array([0, 3, 4], np.int32), np.array([IGNORED, IGNORED, 4], np.int32)
    apart = align([first, last], [whole], words, words)
    assert [each.spans.tolist() for each in apart] == [[[1, 2, 1, 2], [2, 3, 2, 3]], [[2, 3, 4, 5]]]
    assert [each.ids.tolist() for each in apart] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    (joined,) = align([whole], [first, last], words, words)
    assert joined.spans.tolist() == [[1, 2, 1, 2], [2, 3, 2, 3], [4, 5, 5, 6]]
    assert joined.ids.tolist() == [0, 1, 2, 0, 3, 4]
    assert joined.starts.tolist() == [1, 0, 0, 1, 0, 0]


def test_the_first_token_of_a_text_is_in_no_span():
    """Nothing predicts it, on either side."""
    words = Words([b"a", b"b", b"p"])
    bare = np.array([0, 1], np.int32), np.array([0, 1], np.int32)
    asked = np.array([2, 0, 1], np.int32), np.array([IGNORED, 0, 1], np.int32)
    assert align([bare], [asked], words, words)[0].spans.tolist() == [[1, 2, 2, 3]]
    assert align([asked], [bare], words, words)[0].spans.tolist() == [[2, 3, 1, 2]]


@pytest.mark.parametrize("name", ["qwen3", "llama-2", "gemma"])
def test_tokens_spell_their_text(name):
    """The bytes of a text's tokens are the text, a blank before it where the tokenizer writes one; of any vocabulary."""
    tokenizer = FAMILIES[name].tokenizer()
    for text in ("What is the capital of France?", "naïve 中文 🙂\n\tx = 1", "  two  blanks "):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(Spelling(tokenizer).of(ids)).decode() in (text, " " + text)
    assert Spelling(tokenizer).of([tokenizer.eos_token_id]) == [tokenizer.eos_token.encode()]
    assert Spelling(tokenizer).of([10**6]) == [b""]


def test_shared_tokens():
    """Tokens of two makes are shared by what they spell, added ones among themselves, and those that end a turn as told."""
    ours, theirs = FAMILIES["qwen3"].tokenizer(), FAMILIES["llama-2"].tokenizer()
    end = ours.convert_tokens_to_ids("<|im_end|>"), theirs.eos_token_id
    own, other = shared_tokens(ours, theirs, [end])
    pairs = dict(zip(own.tolist(), other.tolist(), strict=True))
    assert pairs[ours.convert_tokens_to_ids("Ġ")] == theirs.convert_tokens_to_ids("▁")
    assert pairs[ours.convert_tokens_to_ids("Ċ")] == theirs.convert_tokens_to_ids("<0x0A>")
    assert pairs[end[0]] == end[1]
    assert len(set(pairs.values())) == len(pairs) > 50
    spelled, others = Spelling(ours).of(own), Spelling(theirs).of(other)
    assert [a for a, b in zip(spelled, others, strict=True) if a != b] == [b"<|im_end|>"]
    same = shared_tokens(ours, FAMILIES["qwen3"].tokenizer())
    assert np.array_equal(*same)
    assert len(same[0]) == len(ours)
