"""What a row and train_on decide for each message."""

import pytest

from forge_data import DataError, tokenize
from forge_data.formats._samples import Chat
from forge_data.masking._train_on import learned_parts

ROLES = ["system", "user", "assistant", "tool", "assistant"]
MESSAGES = [{"role": role, "content": "x"} for role in ROLES]


@pytest.mark.parametrize(
    ("train_on", "text", "expected"),
    [
        ("assistant", {}, "--T-T"),
        ("last", {}, "----T"),
        ("assistant", {"first_completion": 3}, "----T"),
        ("completion", {"first_completion": 2}, "--T-T"),
        ("last", {"first_completion": 2}, "----T"),
        ("assistant", {"trains": (True, True, False, True, True)}, "----T"),
        # The last turn is the last turn: that it is not to be learned_parts does not make the one before it the last.
        ("last", {"trains": (True, True, True, True, False)}, "-----"),
        ("assistant", {"unmask": True}, "-CTCT"),
        ("assistant", {"unmask": True, "trains": (True, False, True, True, True)}, "--TCT"),
        ("all", {}, "--T-T"),
    ],
)
def test_what_is_learned(train_on, text, expected):
    """Answers are learned as turns, other roles under `unmask` as content, and nothing that the row switches off."""
    what = learned_parts(Chat("f:1", MESSAGES, **text), train_on)
    assert "".join({"turn": "T", "content": "C", "": "-"}[says] for says in what) == expected


def test_no_completion():
    """A conversation without prompt and completion has no completion: refused."""
    with pytest.raises(DataError, match="f:1: `train_on` is 'completion', and the row is a conversation without prompt"):
        learned_parts(Chat("f:1", MESSAGES), "completion")


@pytest.mark.parametrize("train_on", ["last", "completion"])
def test_unmask_against_train_on(train_on):
    """A row that learns everything contradicts a setting that learns one turn: refused."""
    with pytest.raises(DataError, match="the row has unmask, .* and `train_on` is"):
        learned_parts(Chat("f:1", MESSAGES, first_completion=1, unmask=True), train_on)


def test_all_and_a_message_that_is_not_to_be_trained(chatml_tokenizer):
    """`train: false` contradicts train_on="all": refused, naming the message."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "train": False}]
    with pytest.raises(DataError, match="message 1 is marked as not to be trained, and `train_on` is 'all'"):
        tokenize({"messages": messages}, chatml_tokenizer, train_on="all")
