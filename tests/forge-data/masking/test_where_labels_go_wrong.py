"""Cases in which other libraries' preparation goes wrong, each against the text that must be learned.

The list was measured on instructlab-training 0.16.2. Golden files cover the same ground as texts; here the fault is named.
"""

import json
from functools import cache

import pytest

from forge_data import DataError, TemplateError, prepare, tokenize

from ..families import FAMILIES
from ..golden import native

HI = {"role": "user", "content": "Hi"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CALLING = [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


@cache
def tokenizer_of(family):
    return FAMILIES[family].tokenizer()


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def learned(family, *messages, **row):
    """Return the learned text, part by part; the ids are the template's own."""
    tokenizer = tokenizer_of(family)
    row = {"messages": list(messages), **row}
    example = tokenize(row, tokenizer, turns="history")
    assert example.input_ids.tolist() == native(tokenizer, row)
    stretches, before = [], False
    for token_id, label in zip(example.input_ids.tolist(), example.labels.tolist(), strict=True):
        if label != -100:
            stretches = [*stretches[:-1], [*stretches[-1], token_id]] if before else [*stretches, [token_id]]
        before = label != -100
    return [tokenizer.decode(stretch) for stretch in stretches]


def test_reasoning_that_is_dropped_from_an_earlier_turn_moves_no_mark():
    """Others map regions to messages by order, and mask the earlier turn's <|im_end|>."""
    message = [HI, answer("Hello.", reasoning_content="Greet."), HI, answer("Again.", reasoning_content="Twice.")]
    assert learned("qwen3", *message) == ["Hello.<|im_end|>", "<think>\nTwice.\n</think>\n\nAgain.<|im_end|>"]


@pytest.mark.parametrize(
    ("family", "wanted"),
    [("qwen3", "<think>\nGreet.\n</think>\n\nHello.<|im_end|>"), ("deepseek-r1-distill", "\n\nHello.<｜end▁of▁sentence｜>")],
)
def test_reasoning_within_the_content_is_no_error(family, wanted):
    """Others raise over an orphan token, and one such row ends the run."""
    assert learned(family, HI, answer("<think>\nGreet.\n</think>\n\nHello.")) == [wanted]


@pytest.mark.parametrize(
    ("family", "end"), [("gemma", "<end_of_turn>"), ("gemma-3", "<end_of_turn>"), ("phi-3", "<|end|>"), ("gpt-oss", "<|end|>")]
)
def test_a_turn_end_that_is_not_the_eos_is_learned(family, end):
    """Others train the EOS or nothing: inner turns of these families never learn to end."""
    first, _ = learned(family, HI, answer("Hello."), HI, answer("Again."))
    assert tokenizer_of(family).eos_token != end
    assert first.endswith("Hello." + end)


def test_no_word_of_a_user_who_speaks_last_is_learned():
    """Others continue to the next EOS, through the user's text."""
    assert learned("phi-3", HI, answer("Hello."), {"role": "user", "content": "my secret"}) == ["Hello.<|end|>"]


def test_a_call_without_content():
    """Others mask the call where the content is null, or fail in the template."""
    for family, call in (
        ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'),
        ("llama-3.1", "weather"),
    ):
        (found,) = learned(family, *CALLING)
        assert call in found
    with pytest.raises(TemplateError, match=r"row: .*(tool call|weather)"):
        tokenize({"messages": CALLING}, tokenizer_of("chatml"))


@pytest.mark.parametrize(
    "injected", ["<|UNMASK_END|>", "<|UNMASK_BEGIN|>me<|UNMASK_END|>", "<|UNMASK_REASONING_BEGIN|>", "<|MASK|>"]
)
@pytest.mark.parametrize("family", ["chatml", "llama-3", "gemma", "qwen3"])
def test_no_text_of_a_user_steers_the_mask(family, injected):
    """Others add tokens to vocabulary and text to find spans: a user who writes them crashes it, or is trained."""
    plain = learned(family, HI, answer("Hello."))
    assert learned(family, {"role": "user", "content": injected}, answer("Hello.")) == plain
    (found,) = learned(family, HI, answer(f"{injected} Hello."))
    assert injected in found


@pytest.mark.parametrize("role", ["Assistant", "model", "bot", "ai"])
def test_a_role_that_is_none_is_refused(role):
    """Others keep the row with no learned token in it."""
    with pytest.raises(DataError, match=rf"row: .*messages\[1\]\.role .*{role}.*assistant"):
        tokenize({"messages": [HI, {"role": role, "content": "Hello."}]}, tokenizer_of("chatml"))


def test_a_conversation_without_an_answer_is_refused():
    """Others keep it."""
    with pytest.raises(DataError, match="row: no token of it is learned"):
        tokenize({"messages": [HI]}, tokenizer_of("chatml"))


@pytest.mark.parametrize("family", ["llama-3", "gemma", "command-r", "llama-2"])
def test_a_template_that_trims_goes_on_trimming(family):
    """Others wrap the content in tokens, which keeps the template from stripping it: the ids differ from inference."""
    bare = learned(family, HI, answer("Hello."))
    assert learned(family, {"role": "user", "content": "\n Hi "}, answer("  Hello.\n\n")) == bare


def test_a_document_is_not_cut_at_an_angle_bracket():
    """Others read old pretraining rows with a pattern that ends at the first `<`."""
    tokenizer = tokenizer_of("chatml")
    example = tokenize({"text": "if a < b: <|user|> c"}, tokenizer)
    assert tokenizer.decode(example.input_ids.tolist()) == "if a < b: <|user|> c<|im_end|>"
    assert (example.labels == example.input_ids).all()


def test_exactly_max_seq_len_is_kept_and_short_rows_are(tmp_path):
    """Others drop a row of exactly max_seq_len tokens, and every row of fewer than 20."""
    tokenizer, data = tokenizer_of("llama-3"), tmp_path / "train.jsonl"
    data.write_text(json.dumps({"messages": [HI, answer("")]}) + "\n" + json.dumps({"messages": [HI, answer("Hello.")]}) + "\n")
    longest = len(tokenize({"messages": [HI, answer("Hello.")]}, tokenizer))
    assert len(prepare(data, tokenizer, tmp_path / "store", max_seq_len=longest, progress=False)) == 2
    assert len(prepare(data, tokenizer, tmp_path / "store", max_seq_len=longest - 1, progress=False)) == 1


def test_dropping_every_row_is_an_error(tmp_path):
    """Others write an empty file, and the loader fails with a bare StopIteration."""
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"messages": [HI, answer("Hello.")]}) + "\n")
    with pytest.raises(DataError, match="max_seq_len"):
        prepare(data, tokenizer_of("chatml"), tmp_path / "store", max_seq_len=4, progress=False)
    assert not (tmp_path / "store").exists()


def test_a_directory_that_holds_a_tokenizer_alone(tmp_path):
    """Others load a model's config.json to tokenise, and raise where there is none."""
    tokenizer_of("qwen3").save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    example = tokenize({"messages": [HI, answer("Hello.")]}, tmp_path)
    assert example.labels.tolist() == tokenize({"messages": [HI, answer("Hello.")]}, tokenizer_of("qwen3")).labels.tolist()


def test_a_flag_that_is_a_word_is_not_taken_for_true():
    """Others take `"unmask": "false"` for true and train the user's text."""
    with pytest.raises(DataError, match="unmask"):
        tokenize({"messages": [HI, answer("Hello.")], "unmask": "false"}, tokenizer_of("chatml"))
