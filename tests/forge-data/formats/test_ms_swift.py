"""Rows of ms-swift mean here what they mean there: the same messages, and the same tokens learned."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from forge_data import BadPairError, DataError, prepare, tokenize
from forge_data.formats._registry import built_in, convert, detect
from forge_data.formats._samples import Chat, Document, Preference, Unpaired
from forge_data.formats.questions._prompts import question

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"name": "aqi", "arguments": {"city": "Beijing"}}
CALLS = [
    USER,
    {"role": "assistant", "content": "I look.\n"},
    {"role": "tool_call", "content": json.dumps(CALL)},
    {"role": "tool_call", "content": {"name": "aqi", "parameters": '{"city": "Shanghai"}'}},
    {"role": "tool_response", "content": '{"aqi": "10"}'},
    {"role": "tool_response", "content": {"aqi": "72"}},
    {"role": "assistant", "content": "Bad."},
]


def read(row, name=None):
    return convert(name or detect("f:1", row), "f:1", row, None, media=True, directory="/rows")


def said(row, name=None):
    return [(message["role"], message["content"]) for message in read(row, name).messages]


def learned(row, tokenizer, **settings):
    """The text of the learned tokens of a row, each run of them by itself."""
    example = tokenize(row, tokenizer, **settings)
    return runs_of(example.input_ids, example.labels, tokenizer)


def runs_of(input_ids, labels, tokenizer):
    runs = [[]]
    for token, label in zip(input_ids, labels, strict=True):
        runs[-1].append(int(token)) if label != -100 else runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize(
    ("row", "name", "messages"),
    [
        ({"query": "hi", "response": "ho"}, None, [USER, BOT]),
        (
            {"query": "hi", "response": "ho", "history": [["a", "b"]], "system": "be brief"},
            None,
            [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER, BOT],
        ),
        ({"instruction": "a", "input": "b", "output": "ho"}, "ms_swift", [{"role": "user", "content": "a\nb"}, BOT]),
        ({"instruction": "hi", "input": "", "output": "ho"}, "ms_swift", [USER, BOT]),
        ({"instruction": "hi", "output": "ho"}, "ms_swift", [USER, BOT]),
        ({"problem": "hi", "solution": "ho", "system_prompt": "be brief"}, "ms_swift", [SYSTEM, USER, BOT]),
        # Two names of an answer, neither of which is response: none is taken, there and here.
        ({"problem": "hi", "solution": "ho", "answer": "he"}, "ms_swift", [USER]),
        ({"query": "hi", "question": "what?", "answer": ["ho", "he"]}, "ms_swift", [USER, BOT]),
        ({"conversation": [{"human": "hi", "assistant": "ho"}], "system": "be brief"}, "ms_swift", [SYSTEM, USER, BOT]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, "ms_swift", [USER, BOT]),
        ({"messages": [SYSTEM, USER, BOT], "system": "be long"}, "ms_swift", [SYSTEM, USER, BOT]),
        ({"messages": [{"role": "human", "content": "hi"}, {"role": "bot", "content": "ho"}]}, "ms_swift", [USER, BOT]),
    ],
)
def test_rows_of_one_answer(row, name, messages):
    """Names of columns, history, system and the line between instruction and input are ms-swift's."""
    assert type(read(row, name)) is Chat
    assert read(row, name).messages == messages


NAMES = {
    "system": ["system", "system_prompt"],
    "query": ["query", "prompt", "input", "instruction", "question", "problem"],
    "response": "response answer output targets target answer_key answers solution text completion content".split(),
}


def as_there(row):
    """ms-swift's AutoPreprocessor (swift/dataset/preprocessor/core.py): columns are renamed, then rows are read."""
    of = {name: meant for meant, names in NAMES.items() for name in names}
    alike = Counter(of[name] for name in row if name in of)
    row = {of[name] if name in of and alike[of[name]] == 1 else name: value for name, value in row.items()}
    if "instruction" in row and "input" in row:
        asked = [row.pop(name) for name in ("instruction", "input")]
        row["query"] = "\n".join(asked) if all(asked) else asked[0] or asked[1]
        row["response"] = row.get("output", row.get("response"))
    turns = [*row.get("history", []), [row.get("query"), row.get("response")]]
    said = [{"role": "system", "content": row["system"]}] if "system" in row else []
    pairs = zip(("user", "assistant") * len(turns), (text for turn in turns for text in turn), strict=True)
    return said + [{"role": role, "content": text} for role, text in pairs if text is not None]


@given(
    st.dictionaries(st.sampled_from([name for names in NAMES.values() for name in names]), st.sampled_from(["", "x", "y z"])),
    st.sampled_from([None, [["a", "b"]]]),
)
def test_names_of_columns_are_read_by_their_rules(row, history):
    """Whichever columns a row has, it becomes the messages that it becomes there, or is refused as one without any."""
    row |= {"history": history} if history else {}
    there = as_there(row)
    said = [message["content"] for message in there if message["role"] != "system"]
    if said in ([], ["a", "b"]):
        with pytest.raises(DataError, match="the format ms_swift needs query, response"):
            convert("ms_swift", "f:1", row, None)
    else:
        assert convert("ms_swift", "f:1", row, None).messages == there


@pytest.mark.parametrize("name", ["query", "problem", "instruction"])
def test_a_question_that_is_null(name, chatml_tokenizer, tmp_path):
    """An answer is not learned without its question because a table has null there; without the field it is, as there."""
    (file := tmp_path / "rows.jsonl").write_text(json.dumps({name: None, "response": "ho", "system": "be brief"}))
    said = rf"rows\.jsonl:1: field {name} is null, and response would be learned without a question; give one"
    with pytest.raises(DataError, match=said):
        prepare(file, chatml_tokenizer, tmp_path / "store", format="ms_swift", num_proc=1)
    assert learned({"response": "ho"}, chatml_tokenizer, format="ms_swift") == ["ho<|im_end|>"]
    kept = {name: None, "messages": [USER, BOT], "response": "x"}
    assert learned(kept, chatml_tokenizer, format="ms_swift") == ["ho<|im_end|>"]


def test_every_answer_is_learned(chatml_tokenizer):
    """As `loss_scale=default` does: of the history too."""
    row = {"query": "hi", "response": "ho", "history": [["a", "b"]]}
    assert learned(row, chatml_tokenizer) == ["b<|im_end|>", "ho<|im_end|>"]
    assert learned(row, chatml_tokenizer, train_on="last") == ["ho<|im_end|>"]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"loss": False}, {"loss": True}, ["ho<|im_end|>"]),
        ({"loss": None}, {}, ["b<|im_end|>", "ho<|im_end|>"]),
        ({"loss": True}, {"loss": False}, ["b<|im_end|>"]),
        ({"loss_scale": 0}, {}, ["ho<|im_end|>"]),
        ({"loss": False, "loss_scale": 2.0}, {}, ["ho<|im_end|>"]),
    ],
)
def test_loss_of_a_message(first, second, text, chatml_tokenizer):
    """A message says whether it is learned; the others are."""
    row = {"messages": [USER, {"role": "assistant", "content": "b"} | first, USER, BOT | second]}
    assert learned(row, chatml_tokenizer) == text


def test_the_scale_of_a_message(chatml_tokenizer):
    """The numbers are weights of its tokens; a list, which is of tokens, is refused."""
    row = {"messages": [USER, {"role": "assistant", "content": "b", "loss_scale": 2.0}, USER, BOT]}
    example = tokenize(row, chatml_tokenizer)
    assert set(example.weights[example.labels != -100].tolist()) == {1.0, 2.0}
    with pytest.raises(DataError, match=r"messages\[1\].loss_scale is a list"):
        read({"messages": [USER, BOT | {"loss_scale": [1.0]}]})
    with pytest.raises(DataError, match=r"messages\[1\].loss is the string 'no'"):
        read({"messages": [USER, BOT | {"loss": "no"}]})
    with pytest.raises(DataError, match="has train and loss, which say two things"):
        read({"messages": [USER, BOT | {"loss": True, "train": False}]})


def test_calls_are_turns_of_the_assistant():
    """Text and calls that follow each other are one turn, as OpenAI writes it; what a tool gave is text."""
    made = read({"messages": CALLS, "tools": '[{"type": "function", "function": {"name": "aqi"}}]'})
    _, turn, *_ = made.messages
    openai = [
        {"type": "function", "function": {"name": "aqi", "arguments": {"city": city}}} for city in ("Beijing", "Shanghai")
    ]
    assert turn == {"role": "assistant", "content": "I look.\n", "tool_calls": openai}
    assert [message["role"] for message in made.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [message["content"] for message in made.messages[2:4]] == ['{"aqi": "10"}', '{"aqi": "72"}']
    assert made.tools == [{"type": "function", "function": {"name": "aqi"}}]
    named = {"tool_call": "function-call", "tool_response": "observation"}
    other = [each | {"role": named.get(each["role"], each["role"])} for each in CALLS]
    assert read({"messages": other}, "ms_swift").messages == made.messages
    alone = read({"messages": [USER, *CALLS[2:]]})
    assert alone.messages[1] == {"role": "assistant", "content": None, "tool_calls": openai}


def test_calls_are_learned_as_openais(with_template):
    """The tokens, and those that are learned, are those of the same row in OpenAI's form."""
    tokenizer = with_template((Path(__file__).parents[1] / "templates" / "qwen2.5.jinja").read_text())
    openai = {"role": "assistant", "content": "I look.\n", "tool_calls": [{"type": "function", "function": CALL}]}
    tools = [{"type": "function", "function": {"name": "aqi", "description": "d", "parameters": {}}}]
    theirs = {"messages": [*CALLS[:3], *CALLS[4:5], CALLS[-1]], "tools": json.dumps(tools)}
    ours = {"messages": [USER, openai, {"role": "tool", "content": '{"aqi": "10"}'}, CALLS[-1]], "tools": tools}
    one, other = (tokenize(row, tokenizer) for row in (theirs, ours))
    assert (one.input_ids.tolist(), one.labels.tolist()) == (other.input_ids.tolist(), other.labels.tolist())
    first, *_ = learned(theirs, tokenizer)
    assert "<tool_call>" in first
    assert '"Beijing"' in first


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "tool_call", "content": "no json"}, r"messages\[1\].content is the string 'no json'; a tool_call is JSON"),
        ({"role": "tool_call", "content": "{}"}, r"messages\[1\].content.name"),
        ({"role": "tool_call", "content": json.dumps(CALL | {"more": 1})}, r"messages\[1\].content.more"),
        ({"role": ["tool_call"], "content": "{}"}, r"messages\[1\].role is a list of 1"),
    ],
)
def test_calls_that_cannot_be_read(message, error):
    """An error names the message as it stands in the file."""
    with pytest.raises(DataError, match=error):
        read({"messages": [USER, message, BOT]})


def test_one_turn_is_learned_or_not():
    """A turn of which the text alone would be learned is refused; one of calls says it in its first."""
    with pytest.raises(DataError, match=r"messages\[2\] is not to be learned as the text before it"):
        read({"messages": [USER, BOT, CALLS[2] | {"loss": False}, CALLS[4], BOT]})
    made = read({"messages": [USER, CALLS[2] | {"loss": False}, CALLS[3], CALLS[4], BOT]})
    assert made.trains == (True, False, True, True)


PAIRS = {
    "response": {"messages": [SYSTEM, USER, BOT], "rejected_response": "no"},
    "a list": {"messages": [SYSTEM, USER, BOT], "rejected_response": [{"role": "assistant", "content": "no"}]},
    "messages": {"messages": [SYSTEM, USER, BOT], "rejected_messages": [SYSTEM, USER, {"role": "assistant", "content": "no"}]},
    "query": {"query": "hi", "response": "ho", "rejected_response": "no", "system": "be brief"},
    "alpaca": {"instruction": "hi", "input": "", "output": "ho", "rejected_response": "no", "system": "be brief"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
        "rejected_response": "no",
        "system": "be brief",
    },
    "messages and a system of its own": {"messages": [USER, BOT], "rejected_response": "no", "system": "be brief"},
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    """The chosen answer ends the conversation, the rejected one stands beside it; both are answers to one prompt."""
    row = PAIRS[name]
    assert detect("f:1", row) == "preference"
    made = read(row)
    assert type(made) is Preference
    assert made.chosen.messages == [SYSTEM, USER, BOT]
    assert made.rejected.messages == [SYSTEM, USER, {"role": "assistant", "content": "no"}]
    assert made.chosen.first_completion == made.rejected.first_completion == 2


def test_pairs_of_several_turns(chatml_tokenizer, write_rows, tmp_path):
    """What is learned is what follows the last turn of the user, in both."""
    row = {"messages": [USER, BOT, USER, {"role": "assistant", "content": "yes"}], "rejected_response": "no"}
    store = prepare(write_rows([row]), chatml_tokenizer, tmp_path / "store")
    assert [runs_of(each.input_ids, each.labels, chatml_tokenizer) for each in store] == [["yes<|im_end|>"], ["no<|im_end|>"]]


def test_pairs_with_calls():
    """The answer begins behind the user, or behind what a tool said under its own name."""
    made = read({"messages": CALLS, "rejected_response": "no"})
    assert (made.chosen.first_completion, len(made.chosen.messages)) == (1, 5)
    assert made.rejected.messages == [USER, {"role": "assistant", "content": "no"}]
    tools = [each | {"role": "tool", "content": "1"} if each["role"] == "tool_response" else each for each in CALLS]
    made = read({"messages": tools, "rejected_response": "no"})
    assert made.chosen.messages[:4] == made.rejected.messages[:4]
    assert made.chosen.first_completion == 4


def test_pairs_with_images():
    """Each side has the images of the row; images of the rejected side alone are two prompts."""
    asked = {"role": "user", "content": "<image>What?"}
    made = read({"messages": [asked, BOT], "rejected_response": "no", "images": ["cat.png"]})
    assert [side.media[0].given for side in (made.chosen, made.rejected)] == ["/rows/cat.png"] * 2
    whole = {"messages": [asked, BOT], "images": ["cat.png"], "rejected_images": ["cat.png"]}
    bad = {"role": "assistant", "content": "no"}
    assert read({**whole, "rejected_messages": [asked, bad]}) == made
    with pytest.raises(BadPairError, match="answer two prompts"):
        read({"messages": [asked, BOT], "images": ["cat.png"], "rejected_images": ["dog.png"]})


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"messages": [USER, BOT], "rejected_response": "ho"}, "rejected is the same as chosen"),
        ({"messages": [USER, BOT], "rejected_response": ""}, "has no message of the assistant"),
        ({"messages": [USER, BOT], "rejected_response": [USER]}, "in which no user speaks"),
        ({"messages": [BOT], "rejected_response": "no"}, "do not begin alike"),
        ({"messages": [], "rejected_response": "no"}, "field messages is"),
        ({"messages": [USER, BOT], "rejected_messages": ["no"], "system": "be brief"}, "is the string 'no'"),
        ({"messages": [USER, BOT], "rejected_messages": [{"role": "user", "content": "you"}, BOT]}, "do not begin alike"),
    ],
)
def test_pairs_that_are_none(row, error):
    """A pair that prefers nothing, or cannot be read, is refused."""
    with pytest.raises(DataError, match=error):
        read(row)


@pytest.mark.parametrize("label", [True, False])
def test_rated_rows(label):
    """KTO's `label` is read under the name kto_tag, beside messages or query and response."""
    for row in ({"messages": [SYSTEM, USER, BOT]}, {"query": "hi", "response": "ho", "system": "be brief"}):
        made = read({**row, "kto_tag": label})
        assert type(made) is Unpaired
        assert (made.answer.messages, made.desirable) == ([SYSTEM, USER, BOT], label)
        assert made.answer.first_completion == 2


def test_prompts():
    """A query is a prompt of messages; its response and other fields stay for the reward."""
    made = question("f:1", {"query": "hi", "system": "be brief", "history": [["a", "b"]], "response": "ho", "solution": "4"})
    assert [each["content"] for each in made.prompt.messages] == ["be brief", "a", "b", "hi"]
    assert json.loads(made.record)["columns"] == {"response": "ho", "solution": "4"}


def test_documents():
    """A document is one message of the assistant; a conversation is none."""
    assert read({"messages": [{"role": "assistant", "content": "I love music"}]}, "document") == Document("f:1", "I love music")
    with pytest.raises(DataError, match="forge sft, with train_on=all"):
        read({"messages": [USER, BOT]}, "document")


def test_findings_name_the_file():
    """The name of a message's field is that of the row, not of what became of it."""
    chat, mine, pair = (built_in(name).field_of for name in ("messages", "ms_swift", "preference"))
    assert chat({"messages": CALLS}, 1, "tool_calls[1].function.name", "") == "messages[3].content"
    assert chat({"messages": CALLS}, 1, "content", "") == "messages[1].content"
    assert chat({"messages": CALLS}, 4, "content", "") == "messages[6].content"
    row = {"query": "a", "response": "b", "history": [["c", "d"]], "system": "s"}
    assert [mine(row, at, "content", "") for at in range(5)] == [
        "system",
        "history[0][0]",
        "history[0][1]",
        "query",
        "response",
    ]
    assert pair(PAIRS["response"], 2, "content", "rejected") == "rejected_response"
    assert pair(PAIRS["response"], 1, "content", "rejected") == "messages[1].content"
    assert pair(PAIRS["messages"], 2, "content", "rejected") == "rejected_messages[2].content"
    assert pair(PAIRS["query"], 2, "content", "chosen") == "response"


def test_a_system_prompt_that_is_no_text():
    """The error names the field of the file, not the message that is made of it."""
    with pytest.raises(DataError, match="field system is int 3; it must be a string"):
        read({"query": "hi", "response": "ho", "system": 3})
