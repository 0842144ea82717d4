"""`train_on_turn_end`: which ends of turns are learned, as under Axolotl's `train_on_eos` and `train_on_eot`."""

from functools import cache

import pytest
from hypothesis import given, strategies as st

import forge_data
from forge_data import DataError, DataSettings, PreferenceDataSettings
from forge_data._example import IGNORED
from forge_data.formats._registry import convert
from forge_data.tokenizing._encoder import Encoder

from ..conftest import PLAIN
from ..families import FAMILIES
from ..lint_rows import OPEN
from .test_roles import NAMES, WORDS, axolotl

WHICH = ("turn", "all", "last", "none")
TALKS = st.lists(st.tuples(WORDS.map(" ".join), st.sampled_from([None, None, True, False])), min_size=2, max_size=6).filter(
    lambda turns: len(turns) % 2 == 0
)


def messages_of(turns):
    """A conversation, in which some messages say themselves whether they are learned."""
    return [
        {"role": ("user", "assistant")[at % 2], "content": text} | ({} if train is None else {"train": train})
        for at, (text, train) in enumerate(turns)
    ]


def learned(encoder, messages):
    """Of each sample the ids, and the places of the tokens that are learned."""
    (encoded,) = encoder.encode([convert("messages", "row", {"messages": messages}, None)])
    return [
        (each.input_ids.tolist(), {at for at, label in enumerate(each.labels) if label != IGNORED}) for each in encoded.examples
    ]


@pytest.fixture(scope="module")
def encoder():
    """A family's encoder with some settings, kept: each looks at its template anew."""
    tokenizers = {name: FAMILIES[name].tokenizer() for name in FAMILIES}
    return cache(lambda name, train_on="assistant", **more: Encoder(tokenizers[name], train_on, **more))


@pytest.fixture(scope="module")
def ends(encoder):
    """By family, the tokens that end turns: the EOS, and what ends the assistant's."""

    def find(name):
        ids, places = learned(encoder(name), messages_of([("q", None), ("a", None)]))[0]
        return {encoder(name)._tokenizer.eos_token_id, ids[max(places)]}

    return cache(find)


ROLES = st.sampled_from(["assistant", "assistant,user"])


@given(name=st.sampled_from(NAMES), which=st.sampled_from(WHICH), turns=TALKS, roles=ROLES)
def test_train_on_eos(encoder, ends, name, which, turns, roles):
    """Labels are Axolotl's, under each of its four values and with messages that say themselves whether they are learned."""
    messages, reader = messages_of(turns), encoder(name, roles, turns="history", train_on_turn_end=which)
    ((ids, places),) = learned(reader, messages)
    labels = [token if at in places else IGNORED for at, token in enumerate(ids)]
    assert (ids, labels) == axolotl(reader._tokenizer, messages, roles.split(","), ends(name), which)


@given(name=st.sampled_from(sorted(FAMILIES)), turns=TALKS, roles=ROLES)
def test_masks_never_leak(encoder, ends, name, turns, roles):
    """The four differ by tokens that end turns and nothing else: one a learned turn, the last, and every message's."""
    messages = messages_of(turns)
    made = {which: learned(encoder(name, roles, train_on_turn_end=which), messages) for which in WHICH}
    ((ids, every),) = made["all"]
    ((whole, turn),) = learned(encoder(name, roles, turns="history"), messages)
    assert (ids, turn <= every) == (whole, True)
    assert {ids[at] for at in every - turn} <= ends(name)
    kept = 0
    for (ids, turn), (_, last), (_, none) in zip(made["turn"], made["last"], made["none"], strict=True):
        assert none <= last <= turn
        assert {ids[at] for at in turn - none} <= ends(name)
        assert last - none <= {max(turn, default=0)}
        kept += len(last - none)
    assert kept <= 1


CHAT = {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "Paris"}]}


def texts(row, tokenizer, **more):
    """The learned text."""
    example = forge_data.tokenize(row, tokenizer, **more)
    return tokenizer.decode(example.labels[example.labels != IGNORED])


@pytest.mark.parametrize(
    ("row", "which", "expected"),
    [
        (CHAT, "turn", "Paris<|im_end|>"),
        (CHAT, "all", "<|im_end|>Paris<|im_end|>"),
        (CHAT, "none", "Paris"),
        ({"prompt": "what ", "completion": "Paris"}, "last", "Paris</s>"),
        ({"prompt": "what ", "completion": "Paris"}, "none", "Paris"),
        ({"prompt": "what ", "completion": "Paris</s>"}, "none", "Paris"),
        ({"text": "Paris"}, "none", "Paris"),
        ({"text": "Paris"}, "all", "Paris</s>"),
    ],
)
def test_what_is_learned(chatml_tokenizer, row, which, expected):
    """Of a conversation the token that ends turns, of text the EOS, which only `none` leaves out."""
    chatml_tokenizer = chatml_tokenizer if "messages" in row else FAMILIES["zephyr"].tokenizer()
    assert texts(row, chatml_tokenizer, train_on_turn_end=which) == expected
    # What was made of the tokenizer for one value is not taken for another.
    assert texts(row, chatml_tokenizer) == texts(row, chatml_tokenizer, train_on_turn_end="turn")


def test_rows_of_axolotls_prompts():
    """Their EOS is left out too; segments say themselves what is learned."""
    tokenizer = FAMILIES["zephyr"].tokenizer()
    row = {"instruction": "add", "output": "Paris"}
    assert texts(row, tokenizer, format="axolotl:alpaca") == "Paris</s>"
    assert texts(row, tokenizer, format="axolotl:alpaca", train_on_turn_end="none") == "Paris"


def test_calls_stay_whole():
    """The end of a block in a turn ends no turn: what closes a call is learned under `none`."""
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    row = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    both = [texts(row, tokenizer, train_on_turn_end=which) for which in ("turn", "none")]
    assert both[0] == both[1] + "<|im_end|>"
    assert both[1].endswith("</tool_call>")


def test_an_end_in_plain_text(with_template):
    """It is left out as a token is, with what a token joins it to; a template that ends nothing has nothing to leave out."""
    plain = with_template(PLAIN)
    assert "### End" in texts(CHAT, plain)
    assert texts(CHAT, plain, train_on_turn_end="none") == "Paris"
    opened = with_template(OPEN)
    assert texts(CHAT, opened, train_on_turn_end="none") == texts(CHAT, opened)


def test_the_lint_warns(chatml_tokenizer):
    """A model that learns no end does not learn to stop: a warning for each turn, and no stop."""
    report = forge_data.lint([CHAT] * 2, chatml_tokenizer, train_on_turn_end="none")
    assert {(each.rule, each.severity) for each in report.findings if each.rule == "untrained_turn_end"} == {
        ("untrained_turn_end", "warn")
    }
    assert not forge_data.lint([CHAT], chatml_tokenizer, train_on_turn_end="last").counts.get("untrained_turn_end")


def test_preferences(chatml_tokenizer, tmp_path):
    """Both answers without their ends; ends of the prompt prefer nothing."""
    row = {
        "prompt": CHAT["messages"][:1],
        "chosen": [CHAT["messages"][1]],
        "rejected": [{"role": "assistant", "content": "hi"}],
    }
    store = forge_data.prepare([row], chatml_tokenizer, tmp_path / "store", train_on_turn_end="none")
    assert [chatml_tokenizer.decode(each.labels[each.labels != IGNORED]) for each in store] == ["Paris", "hi"]
    with pytest.raises(DataError, match="`train_on_turn_end` is 'all', which learns ends of the prompt too"):
        forge_data.prepare([row], chatml_tokenizer, tmp_path / "other", train_on_turn_end="all")
    with pytest.raises(ValueError, match="train_on_turn_end='all' learns ends of the prompt's messages too"):
        PreferenceDataSettings(data_path="x", train_on_turn_end="all")


def test_without_effect(chatml_tokenizer):
    """`train_on=all` learns every token, ends too."""
    with pytest.raises(ValueError, match="train_on_turn_end='none' has no effect with train_on='all'"):
        DataSettings(data_path="x", train_on="all", train_on_turn_end="none")
    with pytest.raises(DataError, match="has no effect with train_on='all'"):
        forge_data.tokenize(CHAT, chatml_tokenizer, train_on="all", train_on_turn_end="last")
