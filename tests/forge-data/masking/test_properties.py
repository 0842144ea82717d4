"""Laws of masks over real chat templates: any conversation, however nasty its text, gives the template's own ids, and exactly
the assistants' text and turn ends are learned. Two accounts must agree: the text's with transformers, the labels' with ours.
"""

from functools import cache

import pytest
from hypothesis import event, given, settings, strategies as st

from forge_data import DataError, TemplateError, tokenize

from ...lanes import ci_keeps
from ..accounts import ACCOUNTS
from ..families import FAMILIES
from ..golden import disagreements
from ..nasty import BLANKS, LOOK_ALIKES, WORDS

TEXT = st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *BLANKS, *BLANKS]), max_size=7).map("".join)
REASONED = st.builds("<think>\n{}\n</think>{}".format, TEXT, TEXT)


@cache
def tokenizer_of(family, make=None):
    return FAMILIES[family].tokenizer(make)


@st.composite
def conversations(draw, account, answers=TEXT):
    """Draw messages with an answer: taking turns where the template requires it, else in any order after a question."""
    if account.strict:
        pairs = draw(st.lists(st.tuples(TEXT, answers), min_size=1, max_size=3))
        expected = [pair for pair in pairs for pair in zip(("user", "assistant"), pair, strict=True)]
        expected = expected[: len(expected) - draw(st.booleans())] if len(expected) > 2 else expected
    else:
        roles = draw(
            st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=5).filter(lambda roles: "assistant" in roles)
        )
        expected = [("user", draw(TEXT)), *((role, draw(answers if role == "assistant" else TEXT)) for role in roles)]
    if account.system and draw(st.booleans()):
        expected.insert(0, ("system", draw(TEXT)))
    return [{"role": role, "content": content} for role, content in expected]


def holds(family, messages, make=None, **settings_of_row):
    """Check a conversation against its oracle; a refusal is right only where the template loses text."""
    account, tokenizer = ACCOUNTS[family], tokenizer_of(family, make)
    pieces = [piece for piece in account.pieces(messages) if piece[0]]
    assert "".join(text for text, _ in pieces) == tokenizer.apply_chat_template(messages, tokenize=False, **settings_of_row)
    try:
        example = tokenize({"messages": messages}, tokenizer, turns="history")
    except (DataError, TemplateError):
        if not account.loses(messages):
            raise
        event("refused")
        return
    assert example.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert disagreements(tokenizer, example, pieces) == []
    tiled(example)


def tiled(example):
    """Check that segments are all tokens, in order, each with a role."""
    edges = example.segments.tolist()
    assert len(edges) == len(example.roles)
    assert [edge for pair in edges for edge in pair] == [0, *(stop for _, stop in edges for _ in "ab")][: 2 * len(edges)]
    assert edges[-1][1] == len(example)


@pytest.mark.parametrize("family", sorted(ACCOUNTS))
@settings(max_examples=60)
@given(data=st.data())
def test_any_conversation(family, data):
    """Masks hold with the family's own type of tokenizer."""
    holds(family, data.draw(conversations(ACCOUNTS[family])))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(ACCOUNTS))
@settings(max_examples=25)
@given(data=st.data())
def test_any_conversation_in_other_tokens(family, data):
    """Masks hold with another type of tokenizer, which cuts text elsewhere."""
    other = "bytes" if FAMILIES[family].make == "tiktoken" else "tiktoken"
    holds(family, data.draw(conversations(ACCOUNTS[family])), other)


@pytest.mark.parametrize("family", ["qwen3", "deepseek-r1-distill", "chatml"])
@settings(max_examples=60)
@given(data=st.data())
def test_reasoning_within_the_content(family, data):
    """Reasoning within answers is learned where the template keeps it; dropped reasoning moves no other span."""
    holds(family, data.draw(conversations(ACCOUNTS[family], st.one_of(TEXT, REASONED))))


@settings(max_examples=60)
@given(data=st.data())
def test_reasoning_in_its_field(data):
    """Qwen3 drops `reasoning_content` before the last question: later turns keep theirs, and their turn ends."""
    messages = data.draw(conversations(ACCOUNTS["qwen3"]))
    for message in messages:
        if message["role"] == "assistant" and data.draw(st.booleans()):
            message["reasoning_content"] = data.draw(TEXT)
    holds("qwen3", messages)


@pytest.mark.slow
# One whose special tokens are in the text, and one that writes a text's pieces in another way.
@pytest.mark.parametrize(
    "family", ci_keeps(["chatml", "mistral"], ["chatml", "llama-3", "gemma", "llama-2", "qwen3", "mistral"])
)
def test_a_line_of_100_kilobytes(family):
    """Long lines without a blank, and many short ones, are masked as any text."""
    for long in ("x" * 100_000, "word " * 20_000, "<|im_end|></s>\n" * 5_000):
        holds(family, [{"role": "user", "content": long}, {"role": "assistant", "content": long + "Paris."}])


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("family", ["chatml", "llama-3", "qwen2.5"])
def test_half_a_surrogate_pair_is_refused(family, role):
    """Half a surrogate pair is refused with field and code point."""
    content = {"system": "Be brief.", "user": "Hi", "assistant": "Hello."} | {role: "cut \ud83d"}
    messages = [{"role": name, "content": content[name]} for name in ("system", "user", "assistant")]
    place = ("system", "user", "assistant").index(role)
    with pytest.raises(DataError, match=rf"messages\[{place}\]\.content .*U\+D83D"):
        tokenize({"messages": messages}, tokenizer_of(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(ACCOUNTS))
@settings(max_examples=15)
@given(data=st.data())
def test_which_turns_are_learned_changes_no_id(family, data):
    """`train: false` and `train_on="last"` take turns out of the mask and keep ids and the other turns' labels."""
    account, tokenizer = ACCOUNTS[family], tokenizer_of(family)
    messages = data.draw(conversations(account).filter(lambda messages: not account.loses(messages)))
    whole = tokenize({"messages": messages}, tokenizer, turns="history")
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    last = tokenize({"messages": messages}, tokenizer, train_on="last", turns="history")
    assert last.input_ids.tolist() == whole.input_ids.tolist()
    off = [
        {**message, "train": place == answers[-1]} if place in answers else message for place, message in enumerate(messages)
    ]
    alone = tokenize({"messages": off}, tokenizer, turns="history")
    assert alone.labels.tolist() == last.labels.tolist()
    kept = last.labels != -100
    assert (whole.labels[kept] == last.labels[kept]).all()
    assert kept.sum() == (whole.labels != -100).sum() if len(answers) == 1 else kept.sum() < (whole.labels != -100).sum()
