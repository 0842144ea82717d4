"""Preferences: two answers to one prompt, which is given or which both begin with."""

import os

import pytest
from hypothesis import given, strategies as st

from forge_data import BadPairError, DataError
from forge_data.formats._preference import preference
from forge_data.formats._samples import Chat, Text

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
    """With a prompt, both sides answer it, as text or messages, and keep the row's template fields."""
    assert sides({"prompt": "a", "chosen": "b", "rejected": "c"}) == (Text("f:1", "a", "b"), Text("f:1", "a", "c"))
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
    """Text is shared up to the last equal character; a space before the answers belongs to them."""
    row = {"chosen": "\n\nHuman: hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: hi\n\nAssistant: Go."}
    prompt = "\n\nHuman: hi\n\nAssistant:"
    assert sides(row) == (Text("f:1", prompt, " Hello!"), Text("f:1", prompt, " Go."))


@given(
    prompt=st.text("ab \n", min_size=1, max_size=9),
    chosen=st.text("xy ", min_size=1, max_size=5),
    rejected=st.text("zy ", min_size=1, max_size=5),
)
def test_nothing_of_a_text_is_lost(prompt, chosen, rejected):
    """Prompt and answer together are the text that was given, and the prompts of both sides are equal."""
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
    """A prompt as text beside whole conversations, as in UltraFeedback, is the last message they share, or refused."""
    row = {"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, BAD]}
    assert sides(row) == (Chat("f:1", [USER, BOT], 1), Chat("f:1", [USER, BAD], 1))
    with pytest.raises(
        DataError, match="f:1: prompt is the string 'ho!', but the last message that chosen and rejected share is the str"
    ):
        sides(row | {"prompt": "ho!"})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"chosen": "a", "rejected": [BAD]}, "f:1: chosen is the string 'a' and rejected is a list of 1; make both"),
        ({"chosen": 1, "rejected": 2}, "f:1: chosen is int 1 and rejected is int 2; make both"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "f:1: prompt is a list of 1 and chosen is the string 'a'; make "
                                                             "both"),
        ({"chosen": "a", "rejected": "b"}, "f:1: there is no prompt, and chosen and rejected do not begin alike; give the "
                                           "prompt"),
        ({"chosen": "ab", "rejected": "a"}, "f:1: there is no prompt, and of rejected nothing is left after what"),
        ({"chosen": "a", "rejected": "a"}, "f:1: there is no prompt, and of chosen nothing is left"),
        ({"chosen": [BOT], "rejected": [BAD]}, r"f:1: chosen\[0\] and rejected\[0\] differ, so there is no prompt"),
        ({"chosen": [USER, BOT], "rejected": [USER]}, "f:1: nothing is left of rejected after the 1 message that chosen and "
                                                      "rejected"),
        ({"chosen": [USER, BOT], "rejected": [USER, BOT]}, "f:1: nothing is left of chosen after the 2 messages"),
        ({"chosen": [USER, {"role": "bot"}], "rejected": [USER]}, r"f:1: field chosen\[1\].role is the string 'bot'"),
        ({"prompt": "a", "chosen": "b", "rejected": "\ud800"}, "f:1: field rejected holds the lone surrogate"),
    ],
)  # fmt: skip
def test_refused(row, expected):
    """A row that makes no pair is refused, with what to do."""
    with pytest.raises(DataError, match=expected):
        sides(row)


ASKED = {"role": "user", "content": "and now?"}
OTHER = {"role": "user", "content": "what else?"}
MUTE = {"role": "assistant", "content": " \n"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("reason", "row", "expected"),
    [
        ("same_answers", {"prompt": "a", "chosen": "bé", "rejected": "bé"}, "field rejected is the same as chosen"),
        ("same_answers", {"prompt": [USER], "chosen": [BOT], "rejected": [dict(BOT)]}, "field rejected is the same as chosen"),
        ("same_answers", {"chosen": "a b", "rejected": "a b"}, "of chosen nothing is left"),
        ("same_answers", {"chosen": [USER, BOT], "rejected": [USER, BOT]}, "nothing is left of chosen"),
        ("empty_answer", {"prompt": "a", "chosen": "", "rejected": "b"}, "field chosen is the string ''; give the answer"),
        ("empty_answer", {"prompt": "a", "chosen": "b", "rejected": " \u3000\n"}, "field rejected is empty"),
        ("empty_answer", {"prompt": "a", "chosen": "b"}, "field rejected is null or not there"),
        ("empty_answer", {"prompt": [USER], "chosen": [], "rejected": [BAD]}, "field chosen is a list of 0"),
        ("empty_answer", {"prompt": [USER], "chosen": [MUTE], "rejected": [BAD]}, "field chosen has no message of the "
                                                                                  "assistant that"),
        ("empty_answer", {"chosen": [USER, BOT], "rejected": [USER, MUTE]}, "field rejected has no message of the assistant "
                                                                            "that"),
        ("empty_answer", {"chosen": [USER, BOT], "rejected": [USER]}, "nothing is left of rejected"),
        ("empty_answer", {"chosen": "ab", "rejected": "a"}, "of rejected nothing is left"),
        ("prompts_differ", {"chosen": "a", "rejected": "b"}, "do not begin alike"),
        ("prompts_differ", {"chosen": [USER, BOT], "rejected": [ASKED, BOT]}, r"chosen\[0\] and rejected\[0\] differ"),
        ("prompts_differ", {"chosen": [USER, BOT, ASKED, BOT], "rejected": [USER, BOT, OTHER, BOT]},
            r"field chosen\[2\] is of the role 'user'"),
        ("prompts_differ", {"prompt": [SYSTEM], "chosen": [USER, BOT], "rejected": [ASKED, BOT]}, r"field chosen\[0\] is of "
                                                                                                  r"the role 'user'"),
        ("prompts_differ", {"prompt": "ho", "chosen": [USER, BOT], "rejected": [USER, BAD]}, "prompt is the string 'ho'"),
        ("prompts_differ", {"prompt_chosen": "a", "prompt_rejected": "b", "chosen": "c", "rejected": "d"},
         "field prompt_chosen is the string 'a' and field prompt_rejected is the string 'b', which are two prompts"),
        ("prompts_differ", {"prompt": "a", "chosen_prompt": "b", "rejected_prompt": "b", "chosen": "c", "rejected": "d"},
         "field prompt is the string 'a' and field chosen_prompt"),
    ],
)  # fmt: skip
def test_what_prefers_nothing(reason, row, expected):
    """A pair that teaches nothing is refused by its reason, with the field; either side may be the bad one."""
    with pytest.raises(BadPairError, match=f"f:1: .*{expected}") as caught:
        sides(row)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("one", "other"), [("prompt_chosen", "prompt_rejected"), ("chosen_prompt", "rejected_prompt")])
def test_a_prompt_for_each_side(one, other):
    """Two equal prompts are one; one without the other is refused."""
    row = {"chosen": "c", "rejected": "d", one: "a", other: "a"}
    assert sides(row) == sides(row | {"prompt": "a"}) == sides({"prompt": "a", "chosen": "c", "rejected": "d"})
    messages = {"chosen": [BOT], "rejected": [BAD], one: [USER], other: [dict(USER)]}
    assert sides(messages) == sides({"prompt": [USER], "chosen": [BOT], "rejected": [BAD]})
    del row[other]
    with pytest.raises(DataError, match=f"f:1 has the fields {one}; give one prompt, or one for chosen and one for rejected"):
        sides(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [BOT, ASKED, BOT], "rejected": [BAD, OTHER, BAD]},
        {"prompt": [USER], "chosen": [CALL], "rejected": [BOT]},
        {"chosen": [USER, BOT, ASKED, BOT], "rejected": [USER, BOT, ASKED, BAD]},
    ],
)
def test_what_does_prefer(row):
    """Answers of several turns may continue with different questions, and a call is an answer without text."""
    assert len(sides(row)) == 2
