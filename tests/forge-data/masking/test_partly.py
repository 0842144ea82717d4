"""`train` and `train_detail` of a message: what they say is learned, and nothing that they leave out.

`axolotl` is `ChatTemplatePrompter.get_offsets_for_train_detail` and `adjust_train_details` of Axolotl 0.18 (067b021c,
`prompt_strategies/chat_template.py`), which that has for the tokens of a content alone.
"""

import numpy as np
import pytest
from hypothesis import given, strategies as st

import forge_data
from forge_data import DataError, TemplateError

from ..families import FAMILIES

NAMES = ("chatml", "llama-3.1", "gemma", "qwen2.5", "zephyr")
QUESTION = {"role": "user", "content": "what is the capital of France"}
ANSWER = {"role": "assistant", "content": "Paris is the fine capital I know"}
HIDDEN, SILENT = {"type": "text", "text": "Paris", "train": False}, {"type": "text", "text": " is"}
WORDS = "what is the capital of France Paris I do not know fine thank you".split()


def entry(start, last, train):
    return {"begin_offset": start, "end_offset": last, "train": train}


def axolotl(offsets, length, details):
    """Which tokens of a content Axolotl learns; its tokens end where the next one begins."""
    starts = [start for start, _ in offsets]
    ends = [*(start - 1 for start in starts[1:]), length - 1]
    learned = [False] * len(starts)
    for detail in details:
        begin, end = detail["begin_offset"], detail["end_offset"]
        first = next((at for at, start in enumerate(starts) if start >= begin), len(starts))
        if first > 0 and ends[first - 1] > begin:
            first -= 1
        last = next((at for at in range(len(starts) - 1, -1, -1) if ends[at] <= end), -1)
        if last < len(starts) - 1 and starts[last + 1] < end:
            last += 1
        for at in range(first, last + 1) if detail["train"] else ():
            learned[at] = True
    return learned


@pytest.fixture(scope="module")
def by_family():
    """By family."""
    return {name: FAMILIES[name].tokenizer() for name in NAMES}


def learned_text(tokenizer, messages, **options):
    example = forge_data.tokenize({"messages": messages}, tokenizer, **options)
    return [tokenizer.decode([each]) for each in example.labels[example.labels != -100].tolist()]


@given(
    name=st.sampled_from(NAMES),
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=8),
    cuts=st.sets(st.integers(1, 40), max_size=4),
    flags=st.lists(st.sampled_from([True, False, None]), min_size=5, max_size=5),
    role=st.sampled_from(["user", "assistant"]),
)
def test_stretches(by_family, name, words, cuts, flags, role):
    """No token with a masked character is learned; all others are Axolotl's, and only tokens that straddle entries differ."""
    tokenizer, content = by_family[name], " ".join(["Zebra", *words])
    edges = [0, *sorted(cut for cut in cuts if cut < len(content)), len(content)]
    pieces = [(*piece, flag) for *piece, flag in zip(edges, edges[1:], flags, strict=False)]
    details = [entry(start, stop - 1, flag) for start, stop, flag in pieces if flag is not None]
    if not details:
        details = [entry(0, 0, False)]
    wanted = np.zeros(len(content), dtype=np.bool_)
    for start, stop, flag in pieces:
        wanted[start:stop] = flag is True
    said = {"role": role, "content": content, "train_detail": details}
    messages = [said] if role == "user" else [QUESTION, said]
    messages += [ANSWER] if role == "user" else [QUESTION | {"train": True}]
    example = forge_data.tokenize({"messages": messages}, tokenizer, turns="history")
    plain = [{"role": each["role"], "content": each["content"]} for each in messages]
    text = tokenizer.apply_chat_template(plain, tokenize=False)
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    assert encoded["input_ids"] == example.input_ids.tolist()
    at = text.index(content)
    stops = [stop for _, stop in encoded["offset_mapping"]]
    # A token begins where the one before ended: offsets may leave out the space that it holds.
    starts = [min(start, before) for (start, _), before in zip(encoded["offset_mapping"], [0, *stops], strict=False)]
    inside = [(n, start - at, stop - at) for n, (start, stop) in enumerate(zip(starts, stops, strict=True))]
    inside = [(n, max(start, 0), stop) for n, start, stop in inside if stop > 0 and start < len(content)]
    inside = [(n, start, min(stop, len(content))) for n, start, stop in inside]
    learned = example.labels != -100
    assert [bool(learned[n]) for n, _, _ in inside] == [bool(wanted[start:stop].all()) for _, start, stop in inside]
    if [start for _, start, _ in inside] == sorted({start for _, start, _ in inside}):
        theirs = axolotl([(start, stop) for _, start, stop in inside], len(content), details)
        for (n, start, stop), their in zip(inside, theirs, strict=True):
            # One that two entries have a part of is learned there by the longer part, and here where both are learned.
            straddles = any(start < edge < stop for edge in edges)
            assert straddles or learned[n] == their


@pytest.mark.parametrize(
    ("messages", "options", "learned"),
    [
        ([QUESTION | {"train": True}, ANSWER | {"train": False}], {}, "what is the capital of France<|im_end|>"),
        ([QUESTION, ANSWER | {"train": True}, QUESTION, ANSWER], {"train_on": "user"},
         "{0}<|im_end|>Paris is the fine capital I know<|im_end|>{0}<|im_end|>".format(QUESTION["content"])),
        ([QUESTION, ANSWER | {"train": True}, QUESTION, ANSWER | {"content": "I"}], {"train_on": "last"},
         "Paris is the fine capital I know<|im_end|>I<|im_end|>"),
        ([QUESTION, ANSWER | {"weight": 1}, QUESTION, ANSWER | {"content": "I"}], {"train_on": "last"}, "I<|im_end|>"),
        ([QUESTION, ANSWER | {"train_detail": [entry(0, 4, True)]}], {}, "Paris<|im_end|>"),
        ([QUESTION, ANSWER | {"train_detail": [entry(0, 4, False)]}, QUESTION, ANSWER | {"content": "I"}], {},
         "<|im_end|>I<|im_end|>"),
        ([QUESTION, ANSWER | {"train_detail": []}, QUESTION, ANSWER | {"content": "I"}], {}, "I<|im_end|>"),
        ([QUESTION, ANSWER | {"train_detail": [entry(0, 4, False)]}, QUESTION, ANSWER | {"content": "I"}],
         {"train_on": "last"}, "I<|im_end|>"),
        ([QUESTION, ANSWER | {"train_detail": [entry(0, 4, False)]}], {"train_on": "user"},
         "what is the capital of France<|im_end|>"),
        ([QUESTION, ANSWER | {"train_detail": [], "train": True}], {}, "Paris is the fine capital I know<|im_end|>"),
        ([QUESTION, ANSWER | {"train_detail": [entry(0, 4, True)], "train": False}, ANSWER], {},
         "Paris is the fine capital I know<|im_end|>"),
        ([QUESTION | {"train_detail": [entry(0, 27, False)]}, ANSWER | {"content": "I"}], {}, "I<|im_end|>"),
        ([QUESTION | {"train_detail": [entry(0, 3, True)]}, ANSWER | {"content": "I"}], {}, "what<|im_end|>I<|im_end|>"),
        ([QUESTION, ANSWER | {"content": [{"type": "text", "text": "Paris", "train": False}, {"type": "text", "text": " is"}]}],
         {}, " is<|im_end|>"),
        ([QUESTION, ANSWER | {"content": [{"type": "text", "text": "Paris", "weight": 0}, {"type": "text", "text": " is"}]}],
         {}, " is<|im_end|>"),
        ([QUESTION | {"content": [HIDDEN, SILENT]}, ANSWER], {}, "Paris is the fine capital I know<|im_end|>"),
        ([QUESTION | {"content": [HIDDEN, SILENT]}, ANSWER], {"train_on": "user"}, " is<|im_end|>"),
        ([QUESTION | {"content": [HIDDEN, SILENT], "train": True}, ANSWER | {"train": False}], {}, " is<|im_end|>"),
        ([QUESTION | {"content": [HIDDEN | {"train": True}, SILENT]}, ANSWER], {"train_on": "last"},
         "Paris<|im_end|>Paris is the fine capital I know<|im_end|>"),
        ([QUESTION, ANSWER | {"content": [HIDDEN, SILENT]}, QUESTION, ANSWER], {"train_on": "last"},
         "Paris is the fine capital I know<|im_end|>"),
    ],
)  # fmt: skip
def test_what_is_learned(chatml_tokenizer, messages, options, learned):
    """What a message says of itself wins over `train_on`; stretches without an entry are not learned.

    A part that says nothing is learned where its message is (Axolotl's documentation: it inherits that).
    """
    assert "".join(learned_text(chatml_tokenizer, messages, **options)) == learned


def test_reasoning_and_system_prompt(qwen3):
    """Of a turn in stretches its reasoning is not learned; a system message before the row's moves nothing."""
    said = ANSWER | {"reasoning_content": "I know", "train_detail": [entry(0, 4, True)]}
    for options in ({}, {"system_prompt": "thank you"}):
        assert "".join(learned_text(qwen3, [QUESTION, said], **options)).startswith("Paris<|im_end|>")


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "gpt-oss"])
def test_calls_behind_stretches(family):
    """Of a turn in stretches nothing of its calls is learned, the template's text behind them neither; the end is."""
    call = {"type": "function", "function": {"name": "capital", "arguments": {"country": "France"}}}
    learned = learned_text(
        FAMILIES[family].tokenizer(), [QUESTION, ANSWER | {"tool_calls": [call], "train_detail": [entry(0, 4, True)]}]
    )
    assert "".join(learned) == "Paris" + {"gpt-oss": "<|call|>"}.get(family, "<|im_end|>")


@pytest.mark.parametrize("more", [{}, {"reasoning_content": "I know"}])
def test_an_open_block_before_stretches(more):
    """Where the prompt opens a block of reasoning, neither that nor what closes it is learned beside stretches."""
    tokenizer = FAMILIES["deepseek-r1-distill"].tokenizer()
    answer = ANSWER | more
    assert "</think>" in "".join(learned_text(tokenizer, [QUESTION, answer]))
    partly = learned_text(tokenizer, [QUESTION, answer | {"train_detail": [entry(0, 4, True)]}])
    assert "".join(partly) == "Paris<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"messages": [QUESTION, ANSWER | {"train_detail": "no"}]}, r"messages\[1\].train_detail is the string 'no'; it must"),
        ({"messages": [QUESTION, ANSWER | {"train_detail": [{"begin_offset": 0}]}]}, r"train_detail\[0\] is .*must be like"),
        ({"messages": [QUESTION, ANSWER | {"train_detail": [entry(0, True, True)]}]}, r"train_detail\[0\] is .*must be like"),
        ({"messages": [QUESTION, ANSWER | {"train_detail": [entry(5, 32, True)]}]}, "from character 5 to 32 of a"),
        ({"messages": [QUESTION, ANSWER | {"train_detail": [entry(3, 2, True)]}]}, "from character 3 to 2 of"),
        ({"messages": [QUESTION, ANSWER | {"train_detail": [entry(0, 4, True), entry(4, 9, False)]}]},
         "says train: false of characters of which .* the opposite"),
        ({"messages": [QUESTION, ANSWER | {"content": [{"type": "text", "text": "a", "train": 1}]}]}, "train is int 1"),
        ({"messages": [QUESTION, ANSWER | {"content": [{"type": "text", "text": "a", "weight": 2}]}]}, "int 2; .* 0 or 1"),
        ({"messages": [QUESTION, ANSWER | {"content": [{"type": "text", "text": "a", "weight": 0, "train": True}]}]},
         "has train and weight, which say two things"),
        ({"messages": [QUESTION, ANSWER | {"content": [{"type": "text", "text": "a", "train": True}],
                                           "train_detail": [entry(0, 0, True)]}]}, "parts of its content say train too"),
        ({"prompt": [QUESTION | {"train": True}], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "I"}]},
         r"message 0 \(role user\) says train: true, and of a preference"),
        ({"prompt": [QUESTION], "completion": [ANSWER | {"train_detail": [entry(0, 1, True)]}], "label": True},
         r"message 1 \(role assistant\) says which stretches"),
    ],
)  # fmt: skip
def test_refused(chatml_tokenizer, row, wrong):
    """Stretches that cannot be meant are refused by their field; preferences learn answers, whole."""
    with pytest.raises(DataError, match=wrong):
        forge_data.tokenize(row, chatml_tokenizer)


def test_all_and_stretches(chatml_tokenizer):
    """`train_on=all` contradicts them."""
    with pytest.raises(DataError, match="message 1 says of stretches of its text .* `train_on` is 'all'"):
        learned_text(chatml_tokenizer, [QUESTION, ANSWER | {"train_detail": [entry(0, 1, True)]}], train_on="all")


def test_content_in_another_spelling(with_template):
    """A template that writes a content otherwise does not say which of its characters are which."""
    tokenizer = with_template(
        "{% for m in messages %}{{ m.role }}: {{ m.content.title().swapcase().swapcase() }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(TemplateError, match="does not write the content of message 1 as it stands"):
        answer = {"role": "assistant", "content": "Fine I", "train_detail": [entry(0, 1, True)]}
        learned_text(tokenizer, [{"role": "user", "content": "Paris"}, answer])
