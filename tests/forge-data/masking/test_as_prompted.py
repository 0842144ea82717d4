"""Trained as it will be asked: each learned turn stands behind the very prompt that the model will get for it.

The oracle knows nothing of tracing: what is asked is the messages before a turn with the generation prompt, what is to be
learned is what the template writes beyond that for the messages up to the turn.
"""

import logging
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from forge_data import DataError, TemplateError, prepare, tokenize
from forge_data.formats._samples import Chat, Preference
from forge_data.tokenizing._encoder import Encoder

from ..accounts import ACCOUNTS
from ..families import FAMILIES
from ..golden import disagreements
from ..nasty import BLANKS, LOOK_ALIKES, WORDS

SWITCHES = ({}, *({name: value} for name, value in product(("enable_thinking", "thinking"), (False, True))))
EOS_AFTER = {"phi-3": "<|endoftext|>"}
"""What a template writes after the last turn's own end."""
TEXT = st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *BLANKS, *BLANKS]), max_size=6).map("".join)
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {}}}]


@cache
def tokenizer_of(family):
    return FAMILIES[family].tokenizer()


@cache
def encoder_of(family, turns="auto"):
    return Encoder(tokenizer_of(family), turns=turns)


def asked(family, messages, index, tools, switch):
    """Return a turn's prompt and the text once it is answered, to the end of the turn; None where one is not of the other."""
    given = {"tools": tools, "tokenize": False, **switch}
    prompt = tokenizer_of(family).apply_chat_template(messages[:index], add_generation_prompt=True, **given)
    answered = tokenizer_of(family).apply_chat_template(messages[: index + 1], **given)
    if not answered.startswith(prompt):
        return None
    return prompt, answered.rstrip().removesuffix(EOS_AFTER.get(family, "</none>")).rstrip(), answered


def is_asked(family, example, text, turns):
    """Tell whether an example is a text of which exactly the answers of some turns are learned, each behind its prompt."""
    tokenizer, pieces, at = tokenizer_of(family), [], 0
    for prompt, answered, _ in turns:
        if not text.startswith(answered):
            return False
        pieces += [(text[at : len(prompt)], False), (text[len(prompt) : len(answered)], True)]
        at = len(answered)
    pieces = [piece for piece in [*pieces, (text[at:], False)] if piece[0]]
    same = example.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    return same and not disagreements(tokenizer, example, pieces)


def as_asked(family, messages, tools=None):
    """Check the samples of a conversation against the oracle; return how many there are."""
    (encoded,) = encoder_of(family).encode([Chat("f:1", messages, tools=tools)])
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [[asked(family, messages, index, tools, switch) for switch in SWITCHES] for index in answers]
    if len(encoded.examples) == 1 < len(answers):
        whole = [
            (tokenizer_of(family).apply_chat_template(messages, tools=tools, tokenize=False, **switch), of_switch)
            for switch, of_switch in zip(SWITCHES, zip(*turns, strict=True), strict=True)
        ]
        (example,) = encoded.examples
        assert any(None not in of_switch and is_asked(family, example, text, of_switch) for text, of_switch in whole)
        return 1
    assert len(encoded.examples) == len(answers)
    for index, example, of_turn in zip(answers, encoded.examples, turns, strict=True):
        texts = [turn[2] for turn in of_turn if turn is not None]
        # A single answer may have messages after it.
        texts += [
            tokenizer_of(family).apply_chat_template(messages, tools=tools, tokenize=False, **switch) for switch in SWITCHES
        ]
        assert any(is_asked(family, example, text, [turn]) for text in texts for turn in of_turn if turn is not None), (
            index,
            tokenizer_of(family).decode(example.input_ids),
        )
    return len(answers)


def talk(*contents):
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"deepseek-r1-distill"}))
def test_several_turns(family):
    """Several turns are one sample where the text extends each of its prompts, and else one sample a turn."""
    count = as_asked(family, talk("Hi", "Hello.", "Capital of France?", "Paris.", "Sure?", "Yes."))
    assert count == (3 if family in ("qwen3", "gpt-oss") else 1)
    # Known by its roles from here on: the same without rendering prompts.
    assert as_asked(family, talk("Who?", "Me.", "You?", "I.", "He?", "Him.")) == count


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", "smollm3", "qwen2.5", "llama-3.1", "command-r"])
def test_the_user_speaks_last(family):
    """What follows the last answer changes neither what is learned nor its context."""
    as_asked(family, talk("Hi", "Hello.", "Bye"))


def test_a_system_message_that_moves():
    """A template that writes the system message into the last user's turn asks with it, and loses it once answered."""
    messages = [{"role": "system", "content": "Be brief."}, *talk("Hi", "Hello.")]
    with pytest.raises(TemplateError, match="prompts for message 2 with .*Be brief.*, and writes .*Hello"):
        encoder_of("mistral-nemo").encode([Chat("f:1", messages)])


@pytest.mark.parametrize("family", ["qwen3", "qwen2.5", "gpt-oss", "llama-3.1"])
def test_calls_and_results(family):
    """A call is learned behind the prompt for it, an answer to its result behind that result."""
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "18 degrees"}
    as_asked(family, [*talk("Weather?"), call, result, {"role": "assistant", "content": "Mild."}], TOOLS)


@pytest.mark.parametrize("field", ["reasoning_content", "content"])
def test_reasoning(field):
    """With reasoning in some turns, each turn is learned with its own, and thinks only where it has some."""
    thought = {"content": "Hello.", "reasoning_content": "Greet."} if field != "content" else {
        "content": "<think>\nGreet.\n</think>\n\nHello."
    }  # fmt: skip
    first = [{"role": "user", "content": "Hi"}, {"role": "assistant", **thought}]
    (encoded,) = encoder_of("qwen3").encode([Chat("f:1", [*first, *talk("And?", "So.")])])
    texts = [learned_text("qwen3", example) for example in encoded.examples]
    assert texts == ["<think>\nGreet.\n</think>\n\nHello.<|im_end|>", "So.<|im_end|>"]
    assert encoded.forms == {"one_sample_a_turn", "enable_thinking=false"}
    as_asked("qwen3", [*first, *talk("And?", "So.")])


def learned_text(family, example):
    return tokenizer_of(family).decode(example.labels[example.labels != -100])


def test_a_rows_own_argument_stays():
    """An argument that a row gives is not chosen for it."""
    chat = Chat("f:1", talk("Hi", "Hello."), template_kwargs={"enable_thinking": True})
    (encoded,) = encoder_of("qwen3").encode([chat])
    assert learned_text("qwen3", encoded.examples[0]) == "<think>\n\n</think>\n\nHello.<|im_end|>"
    assert not encoded.forms


def test_a_prompt_that_the_row_does_not_answer(with_template):
    """A prompt whose end the template never writes is refused with the remedies; history takes the text."""
    tokenizer = with_template(without_block("My steps:\n", always=True))
    with pytest.raises(TemplateError, match=r"f:1: .* prompts for message 1 with .*My steps.*`chat_template`.*`turns`"):
        Encoder(tokenizer).encode([Chat("f:1", talk("Hi", "Hello."))])
    (encoded,) = Encoder(tokenizer, turns="history").encode([Chat("f:1", talk("Hi", "Hello."))])
    assert split_at_prompt(tokenizer, encoded.examples[0])[1] == "Hello.<|im_end|>"
    assert [(note.rule, note.field, note.warns) for note in encoded.notes] == [("not_as_prompted", "messages[1]", False)]


def test_both_answers_of_a_preference_think_or_neither():
    """Both sides have one prompt, though one alone has reasoning; answers of several turns that need one text are refused."""
    chosen = [*talk("Hi"), {"role": "assistant", "content": "Hello.", "reasoning_content": "Greet."}]
    (encoded,) = encoder_of("qwen3").encode([pair(chosen, talk("Hi", "No."))])
    prompts = [
        tokenizer_of("qwen3").decode(example.input_ids[: int((example.labels != -100).argmax())])
        for example in encoded.examples
    ]
    assert prompts[0] == prompts[1] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    several = talk("Hi", "Hello.", "And?", "So.")
    with pytest.raises(DataError, match="an answer of several learned turns"):
        encoder_of("qwen3").encode([pair(several, talk("Hi", "No."))])


def pair(chosen, rejected):
    return Preference("f:1", Chat("f:1", chosen, 1), Chat("f:1", rejected, 1))


def test_a_store_counts_rows_and_samples_apart(tmp_path, write_rows, logged):
    """A row of two turns becomes two samples of one place; the accounting says how rows were rendered, and so does the log."""
    rows = write_rows([{"messages": talk("Hi", "Hello.", "And?", "So.")}, {"messages": talk("Hi", "Again.")}])
    messages = logged(logging.INFO)
    store = prepare(rows, tokenizer_of("qwen3"), tmp_path / "store", progress=False)
    assert (store.accounting.read, store.accounting.kept, store.accounting.samples) == (2, 2, 3)
    assert store.accounting.forms == {"enable_thinking=false": 2, "one_sample_a_turn": 1}
    assert [store.source(index) for index in range(3)] == ["train.jsonl:1", "train.jsonl:1", "train.jsonl:2"]
    assert "rendered 2 enable_thinking=false, 1 one_sample_a_turn" in "\n".join(messages)
    history = prepare(rows, tokenizer_of("qwen3"), tmp_path / "history", turns="history", progress=False)
    assert (len(history), history.fingerprint == store.fingerprint) == (2, False)
    assert history.lint.stop_counts["not_as_prompted"] == 1
    (finding,) = [each for each in history.lint.findings if each.rule == "not_as_prompted"]
    assert ["<think>" in text for text in finding.texts] == [False, True]
    assert [text.strip().endswith("Hello.<|im_end|>") for text in finding.texts] == [True, True]
    assert "1 row with turns that are learned as the whole conversation's text has them" in "\n".join(messages)


def test_one_row_is_one_example():
    """`tokenize` refuses a row that becomes several samples, and says what makes one of it."""
    row = {"messages": talk("Hi", "Hello.", "And?", "So.")}
    with pytest.raises(DataError, match="becomes 2 samples, one for each learned turn"):
        tokenize(row, tokenizer_of("qwen3"))
    assert learned_text("qwen3", tokenize(row, tokenizer_of("qwen3"), train_on="last")) == "So.<|im_end|>"


def test_every_token_is_learned_in_one_text():
    """Where everything is learned there is one text; turns that it has in another form than asked for are noted."""
    for row in ({"unmask": True}, {}):
        encoder = Encoder(tokenizer_of("qwen3"), "assistant" if row else "all")
        (encoded,) = encoder.encode([Chat("f:1", talk("Hi", "Hello.", "And?", "So."), **row)])
        assert len(encoded.examples) == 1
        assert encoded.forms == {"as_history"}
        assert [note.field for note in encoded.notes if note.rule == "not_as_prompted"] == ["messages[1]"]


@st.composite
def conversations(draw, account):
    pairs = draw(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
    messages = talk(*(text for pair in pairs for text in pair))
    return [{"role": "system", "content": draw(TEXT)}, *messages] if account.system and draw(st.booleans()) else messages


@pytest.mark.parametrize("family", sorted(set(ACCOUNTS) - {"deepseek-r1-distill"}))
@settings(max_examples=25)
@given(data=st.data())
def test_any_conversation(family, data):
    """Whatever texts say, blanks at their ends included, turns are learned as they are asked for."""
    messages = data.draw(conversations(ACCOUNTS[family]))
    if not ACCOUNTS[family].loses(messages):
        as_asked(family, messages)


BLOCKS = ("<think>\n\n</think>\n\n", "<|channel>thought\n<channel|>", "<|START_THINKING|><|END_THINKING|>")


def without_block(block, *, always):
    """A template that asks with a closed empty block, always or with thinking off, and writes answers without one."""
    closed = block if always else "{% if enable_thinking is defined and not enable_thinking %}" + block + "{% endif %}"
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m.reasoning_content %}"
        "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + closed + "{% endif %}"
    )


def split_at_prompt(tokenizer, example):
    """Return the text before the first learned token, and the learned text."""
    learned = example.labels != -100
    assert learned[int(learned.argmax()) :].sum() == learned.sum()
    return tokenizer.decode(example.input_ids[: int(learned.argmax())]), tokenizer.decode(example.labels[learned])


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_an_answer_behind_an_empty_block(block, always, with_template):
    """Where the prompt ends with a closed empty block, the answer is learned behind it, turn by turn, also of a preference."""
    tokenizer = with_template(without_block(block, always=always))
    messages, encoder = talk("Hi", " Hello.", "And\n?", "So.</s>", "Bye"), Encoder(tokenizer)
    (encoded,) = encoder.encode([Chat("f:1", messages)])
    assert len(encoded.examples) == 2
    assert encoded.forms == {"one_sample_a_turn", "behind_empty_block"} | (set() if always else {"enable_thinking=false"})
    for index, example in zip((1, 3), encoded.examples, strict=True):
        prompt = tokenizer.apply_chat_template(
            messages[:index], add_generation_prompt=True, enable_thinking=False, tokenize=False
        )
        assert prompt.endswith(block)
        assert split_at_prompt(tokenizer, example) == (prompt, messages[index]["content"] + "<|im_end|>")
        # Every token is someone's, and the block is of the turn that it begins.
        (start, stop), role = example.segments[-1], example.roles[-1]
        assert role == "assistant"
        assert tokenizer.decode(example.input_ids[start:stop]).endswith(
            f"<|im_start|>assistant\n{block}{messages[index]['content']}<|im_end|>\n"
        )
    (encoded,) = encoder.encode([pair(talk("Hi", "Hello."), talk("Hi", "No."))])
    chosen, rejected = (split_at_prompt(tokenizer, example) for example in encoded.examples)
    assert chosen[0] == rejected[0]
    assert chosen[0].endswith(block)
    assert (chosen[1], rejected[1]) == ("Hello.<|im_end|>", "No.<|im_end|>")


def test_reasoning_is_not_learned_behind_an_empty_block(with_template):
    """A turn that thinks, in its field or within its text, is refused where the prompt says that it has thought."""
    encoder = Encoder(with_template(without_block(BLOCKS[0], always=True)))
    for more in ({"reasoning_content": "Greet."}, {"content": "<think>\nGreet.\n</think>\n\nHello."}):
        with pytest.raises(TemplateError, match="prompts for message 1 with"):
            encoder.encode([Chat("f:1", [*talk("Hi"), {"role": "assistant", "content": "Hello.", **more}])])
    switched = Encoder(with_template(without_block(BLOCKS[0], always=False)))
    (encoded,) = switched.encode(
        [Chat("f:1", [*talk("Hi"), {"role": "assistant", "content": "Ho.", "reasoning_content": "G"}])]
    )
    assert not encoded.forms & {"behind_empty_block", "enable_thinking=false"}


def test_a_block_that_is_answered_within_is_no_empty_one(with_template):
    """Neither closed nor just opened: nothing tells what would follow."""
    for block in ("<think>\nNo.\n</think>\n\n", "</think>", "<think>\nSo"):
        with pytest.raises(TemplateError, match="prompts for message 1 with"):
            Encoder(with_template(without_block(block, always=True))).encode([Chat("f:1", talk("Hi", "Hello."))])


def test_a_closing_tag_in_place_of_the_block(with_template):
    """DeepSeek-V3.2 asks with `<think></think>` and writes `</think>` before the answer: it is learned behind the block."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}</think>{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
    )
    tokenizer = with_template(template)
    (encoded,) = Encoder(tokenizer).encode([Chat("f:1", talk("Hi", "Hello."))])
    (example,) = encoded.examples
    prompt = tokenizer.apply_chat_template(talk("Hi"), add_generation_prompt=True, tokenize=False)
    assert split_at_prompt(tokenizer, example) == (prompt, "Hello.<|im_end|>")


def opens_block(opening, closing, *, writes):
    """A template that asks with an open block, and writes one around reasoning, or none at all."""
    reasoning = "{% if m.reasoning_content %}{{ '" + opening + "' + m.reasoning_content + '" + closing + "' }}{% endif %}"
    cut = "{% set text = m['content'].split('</think>')[-1] %}"
    return (
        "{% for m in messages %}"
        + cut
        + "{{ '<|im_start|>' + m['role'] + '\n' }}"
        + (reasoning if writes else "")
        + "{{ text }}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
        + opening
        + "' }}{% endif %}"
    )


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("<think>\n", "\n</think>\n\n"), ("<think>", "</think>"), ("<|START_THINKING|>", "<|END_THINKING|>")],
)
def test_an_open_block_is_closed_as_the_template_does(opening, closing, with_template):
    """A turn without reasoning learns the end of the block that its prompt opens, and one with reasoning both."""
    tokenizer = with_template(opens_block(opening, closing, writes=True))
    messages = talk("Hi", " Hello.", "And\n?", "So.</s>", "Bye")
    messages[3]["reasoning_content"] = "Two."
    (encoded,) = Encoder(tokenizer).encode([Chat("f:1", messages)])
    assert encoded.forms == {"one_sample_a_turn", "behind_open_block"}
    for index, reasoning, example in zip((1, 3), ("", "Two."), encoded.examples, strict=True):
        prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, tokenize=False)
        learned = f"{reasoning}{closing}{messages[index]['content']}<|im_end|>"
        assert split_at_prompt(tokenizer, example) == (prompt, learned)
        (start, stop), role = example.segments[-1], example.roles[-1]
        assert role == "assistant"
        assert tokenizer.decode(example.input_ids[start:stop]).endswith(f"{opening}{learned}\n")


@pytest.mark.parametrize(
    ("more", "reasoning"),
    [
        ({}, ""),
        ({"reasoning_content": "Two."}, "Two."),
        ({"content": "<think>\nTwo.\n</think>\n\nHello."}, "Two."),
    ],
)
def test_an_open_block_of_a_template_that_writes_none(more, reasoning, with_template):
    """DeepSeek-R1's distills cut reasoning out of answers: it is learned behind their prompt, with the block's end."""
    tokenizer = with_template(opens_block("<think>\n", "", writes=False))
    messages = [*talk("Hi"), {"role": "assistant", "content": "Hello.", **more}]
    (encoded,) = Encoder(tokenizer).encode([Chat("f:1", messages, weights=(1.0, 0.5))])
    (example,) = encoded.examples
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert split_at_prompt(tokenizer, example) == (prompt, f"{reasoning}\n</think>\n\nHello.<|im_end|>")
    assert example.weights is not None
    assert example.weights.tolist() == [0.5 if learned else 0.0 for learned in example.labels != -100]
    assert not encoded.notes


def test_reasoning_in_two_places_is_not_learned_behind_an_open_block(with_template):
    """Which of them the model would write is not known."""
    encoder = Encoder(with_template(opens_block("<think>\n", "", writes=False)))
    for more in ("<think>\nA\n</think>\n<think>\nB\n</think>\nHo", "Ho <think>A</think> ho"):
        with pytest.raises(TemplateError, match="prompts for message 1 with"):
            encoder.encode([Chat("f:1", [*talk("Hi"), {"role": "assistant", "content": more, "reasoning_content": "C"}])])


def test_weights_behind_an_empty_block(with_template):
    """A turn's weight is that of its learned tokens, which the block moves."""
    chat = Chat("f:1", talk("Hi", "Hello."), weights=(1.0, 0.5))
    (encoded,) = Encoder(with_template(without_block(BLOCKS[0], always=True))).encode([chat])
    (example,) = encoded.examples
    assert example.weights is not None
    assert example.weights.tolist() == [0.5 if learned else 0.0 for learned in example.labels != -100]
