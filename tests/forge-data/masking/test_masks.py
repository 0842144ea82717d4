"""Laws of masks, against an oracle of each template that knows bytes and neither offsets nor prefixes."""

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import pre_tokenizers

from forge_data import tokenize

LOOK_ALIKES = [
    "<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<end_of_turn>", "</s>", "<s>", "ASSISTANT:", "### End",
    "### Assistant:\n",
    "[/INST]", "{% generation %}", "<|UNMASK_BEGIN|>", "{{ bos_token }}", "<|endoftext|>",
]  # fmt: skip
TEXT = st.lists(
    st.sampled_from([*LOOK_ALIKES, " ", "\n", "\n\n", "  ", "a", "Paris", "é", "🙂", ".", "1", "\u200b", "\xa0"]), max_size=6
).map("".join)
NAMES = ["chatml", "chatml, other EOS", "llama-3", "gemma", "zephyr", "vicuna", "llama-2", "plain closing", "generation marks"]


def _byte_of():
    """GPT-2's table: character that stands for a byte in a byte-level vocabulary → byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_of()


def sizes(tokenizer, ids):
    """Return the bytes that each token stands for."""
    added = tokenizer.added_tokens_decoder
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return [
        added[i].content.encode() if i in added else bytes(BYTE_OF[c] for c in token)
        for i, token in zip(ids, tokens, strict=True)
    ]


def expected_labels(tokenizer, ids, pieces):
    """Compute labels: a token is learned if it holds a learned byte; no offsets, no prefixes, no template."""
    learned = [flag for text, flag in pieces for _ in text.encode()]
    labels, at = [], 0
    for token_id, data in zip(ids, sizes(tokenizer, ids), strict=True):
        labels.append(token_id if any(learned[at : at + len(data)]) else -100)
        at += len(data)
    assert at == len(learned)
    return labels


@st.composite
def conversations(draw, roles):
    """Draw rows that begin with a system or user message and have an answer; strictly alternating where roles are two."""
    pairs = draw(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
    messages = [
        {"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    if "system" in roles and draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(TEXT)})
    if "tool" in roles:
        for role in draw(st.lists(st.sampled_from(roles), max_size=2)):
            messages.insert(draw(st.integers(1, len(messages))), {"role": role, "content": draw(TEXT)})
    if draw(st.booleans()):
        messages = messages[: max(2, len(messages) - 1)]
    return messages


def test_the_byte_table():
    """The oracle's byte table is the one that byte-level tokenizers use."""
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(data=st.data())
def test_ids_and_labels(families, tokenizers, name, trim_offsets, data):
    """For any conversation, with look-alikes of every special token, ids are apply_chat_template's, and exactly the
    assistants' text and turn ends are learned.
    """
    family, tokenizer = families[name], tokenizers[name, trim_offsets]
    messages = data.draw(conversations(family.roles).filter(lambda ms: any(m["role"] == "assistant" for m in ms)))
    pieces = list(family.pieces(messages))
    assert "".join(text for text, _ in pieces) == tokenizer.apply_chat_template(messages, tokenize=False)

    example = tokenize({"messages": messages}, tokenizer)

    native = tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert example.input_ids.tolist() == native
    assert example.labels.tolist() == expected_labels(tokenizer, native, pieces)


@pytest.mark.parametrize("name", ["chatml", "llama-3", "zephyr", "vicuna", "plain closing", "generation marks"])
@settings(max_examples=40)
@given(data=st.data())
def test_prompt_and_completion_as_messages(families, tokenizers, name, data):
    """A conversation cut in two keeps its ids, and what is learned is what was learned of the second part."""
    family, tokenizer = families[name], tokenizers[name, True]
    messages = data.draw(conversations(("system", "user", "assistant")).filter(lambda ms: ms[-1]["role"] == "assistant"))
    cut = data.draw(st.sampled_from([i for i, m in enumerate(messages) if m["role"] == "assistant"]))

    example = tokenize({"prompt": messages[:cut], "completion": messages[cut:]}, tokenizer)

    earlier = sum(message["role"] == "assistant" for message in messages[:cut])
    pieces, turn = [], -1
    for text, learned in family.pieces(messages):
        turn += learned
        pieces.append((text, learned and turn >= earlier))
    whole = tokenize({"messages": messages}, tokenizer)
    assert example.input_ids.tolist() == whole.input_ids.tolist()
    assert example.labels.tolist() == expected_labels(tokenizer, whole.input_ids.tolist(), pieces)


@settings(max_examples=60)
@given(prompt=TEXT, completion=TEXT)
def test_prompt_and_completion_as_strings(chatml_tokenizer, prompt, completion):
    """The joined text is tokenised once, tokens with a byte of the completion are learned, and one EOS ends it."""
    example = tokenize({"prompt": prompt, "completion": completion + "x"}, chatml_tokenizer)
    joined = chatml_tokenizer(prompt + completion + "x")["input_ids"]
    assert example.input_ids.tolist() == [*joined, chatml_tokenizer.eos_token_id]
    pieces = [(prompt, False), (completion + "x", True)]
    assert example.labels.tolist() == [*expected_labels(chatml_tokenizer, joined, pieces), chatml_tokenizer.eos_token_id]
