"""Preferences: two answers to one prompt, which is there or which both begin with."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_data import DataError
from forge_data._preference import preference
from forge_data._sample_types import Chat, Text

USER, BOT, BAD = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "assistant", "content": "no"},
)
SYSTEM = {"role": "system", "content": "s"}


def sides(row):
    made = preference("f:1", row)
    return made.chosen, made.rejected


def test_explicit():
    """With a prompt, both sides answer it, in text or in messages, and take along what the row tells the template."""
    assert sides({"prompt": "a", "chosen": "b", "rejected": "b"}) == (Text("f:1", "a", "b"), Text("f:1", "a", "b"))
    chosen, rejected = sides({"prompt": [SYSTEM, USER], "chosen": [BOT], "rejected": [BAD], "tools": [{"name": "f"}]})
    assert (chosen.messages, chosen.first_completion, chosen.tools) == ([SYSTEM, USER, BOT], 2, [{"name": "f"}])
    assert (rejected.messages, rejected.first_completion, rejected.tools) == ([SYSTEM, USER, BAD], 2, [{"name": "f"}])


def test_shared_messages():
    """Without one, the prompt is the messages that both begin with, however long the sides are."""
    assert sides({"chosen": [SYSTEM, USER, BOT], "rejected": [SYSTEM, USER, BAD]}) == (
        Chat("f:1", [SYSTEM, USER, BOT], 2),
        Chat("f:1", [SYSTEM, USER, BAD], 2),
    )
    chosen, rejected = sides({"chosen": [USER, BOT, USER, BOT], "rejected": [USER, BAD]})
    assert chosen.first_completion == rejected.first_completion == 1


def test_shared_text():
    """Text is shared to the last character that is the same; a blank before the answers belongs to them."""
    row = {"chosen": "\n\nHuman: hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: hi\n\nAssistant: Go."}
    prompt = "\n\nHuman: hi\n\nAssistant:"
    assert sides(row) == (Text("f:1", prompt, " Hello!"), Text("f:1", prompt, " Go."))


@given(
    prompt=st.text("ab \n", min_size=1, max_size=9),
    chosen=st.text("xy ", min_size=1, max_size=5),
    rejected=st.text("zy ", min_size=1, max_size=5),
)
def test_nothing_of_a_text_is_lost(prompt, chosen, rejected):
    """Prompt and answer together are the text that was given, and the prompts of both sides are one."""
    row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    shared = os.path.commonprefix([row["chosen"], row["rejected"]]).removesuffix(" ")
    if not shared or not all(row[name][len(shared) :].strip() for name in row):
        with pytest.raises(DataError, match="nothing is left|do not begin alike"):
            sides(row)
        return
    one, two = sides(row)
    assert one.prompt + one.completion == row["chosen"]
    assert two.prompt + two.completion == row["rejected"]
    assert one.prompt == two.prompt
    assert one.completion[:1] != two.completion[:1] or one.completion[:1] == " "


def test_the_prompt_twice():
    """A prompt in text beside whole conversations, as UltraFeedback has it, is the last message they share, or refused."""
    row = {"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, BAD]}
    assert sides(row) == (Chat("f:1", [USER, BOT], 1), Chat("f:1", [USER, BAD], 1))
    with pytest.raises(
        DataError, match="f:1: prompt is the string 'ho!', but the last message that chosen and rejected share is the str"
    ):
        sides(row | {"prompt": "ho!"})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "a", "rejected": [BAD]}, "f:1: chosen is the string 'a' and rejected is a list of 1; make both"),
        ({"chosen": 1, "rejected": 2}, "f:1: chosen is int 1 and rejected is int 2; make both"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "f:1: prompt is a list of 1 and chosen is the string 'a'; make both"),
        ({"chosen": "a", "rejected": "b"}, "f:1: there is no prompt, and chosen and rejected do not begin alike; give the prompt"),
        ({"chosen": "ab", "rejected": "a"}, "f:1: there is no prompt, and of rejected nothing is left behind what"),
        ({"chosen": "a", "rejected": "a"}, "f:1: there is no prompt, and of chosen nothing is left"),
        ({"chosen": [BOT], "rejected": [BAD]}, r"f:1: chosen\[0\] and rejected\[0\] differ, so there is no prompt"),
        ({"chosen": [USER, BOT], "rejected": [USER]}, "f:1: nothing is left of rejected behind the 1 messages that chosen and rejected"),
        ({"chosen": [USER, BOT], "rejected": [USER, BOT]}, "f:1: nothing is left of chosen behind the 2 messages"),
        ({"chosen": [USER, {"role": "bot"}], "rejected": [USER]}, r"f:1: field chosen\[1\].role is the string 'bot'"),
        ({"prompt": "a", "chosen": "b", "rejected": "\ud800"}, "f:1: field rejected holds the lone surrogate"),
    ],
)  # fmt: skip
def test_refused(row, said):
    """What makes no pair is refused, with what to do."""
    with pytest.raises(DataError, match=said):
        sides(row)
