"""Where a template ends a turn with nothing, the model has to write the stop token with which the next message begins."""

import json

import pytest

from forge_data import DataError, TokenizerError, lint, load_tokenizer, prepare, tokenize

from ..conftest import byte_level

GLM = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'tool' %}<|observation|>\n"
    "{{ m.content }}{% else %}<|assistant|>\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>", "</tool_call>")
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
ROW = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
}


@pytest.fixture
def model(tmp_path):
    """A directory of a tokenizer, and of the model's EOS list."""
    tokenizer = byte_level(SPECIAL, trim_offsets=False, eos_token="<|endoftext|>")
    tokenizer.chat_template = GLM
    tokenizer.save_pretrained(tmp_path / "model")
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return tmp_path / "model"


def learned(tokenizer, example):
    found, inside = [], False
    for token, label in zip(example.input_ids.tolist(), example.labels.tolist(), strict=True):
        if label != -100:
            found = [*found[:-1], [*found[-1], token]] if inside else [*found, [token]]
        inside = label != -100
    return [tokenizer.decode(ids) for ids in found]


def test_a_stop_token_of_the_eos_list(model):
    """A call ends with the marker of its result, an answer with that of the user, appended where the row ends there."""
    tokenizer = load_tokenizer(model)
    example = tokenize(ROW, tokenizer)
    assert learned(tokenizer, example) == ["<tool_call>look</tool_call><|observation|>", "c<|user|>", "e<|user|>"]
    assert tokenizer.decode(example.input_ids).endswith("<|assistant|>\ne<|user|>")
    assert example.segments[-1, 1] == len(example)
    open_call = {"messages": ROW["messages"][:2]}
    assert learned(tokenizer, tokenize(open_call, tokenizer)) == ["<tool_call>look</tool_call><|observation|>"]


def test_it_is_counted_and_nothing_is_stopped(model, tmp_path, write_rows):
    """The accounting says which token was learned as the turns' end, and the lint has nothing to stop."""
    store = prepare(write_rows([ROW]), model, tmp_path / "store", progress=False)
    assert store.accounting.forms == {"turn_end=<|observation|>": 1, "turn_end=<|user|>": 1}
    assert store.lint.stops == 0
    (model / "generation_config.json").unlink()
    report = lint(write_rows([{"messages": ROW["messages"][4:]}]), model)
    assert report.stop_counts == {"untrained_turn_end": 1}
    again = prepare(write_rows([ROW]), model, tmp_path / "store", progress=False)
    assert again.inputs != store.inputs


def test_a_token_of_the_users_choice(model):
    """`turn_end` names the token, also one with which no message begins; what is no special token is refused."""
    (model / "generation_config.json").unlink()
    tokenizer = load_tokenizer(model)
    row = {"messages": ROW["messages"][4:]}
    assert learned(tokenizer, tokenize(row, tokenizer, turn_end="<|user|>")) == ["e<|user|>"]
    assert learned(tokenizer, tokenize(row, tokenizer, turn_end="<|endoftext|>")) == ["e<|endoftext|>"]
    with pytest.raises(TokenizerError, match="`turn_end` is 'STOP', which is no special token"):
        tokenize(row, tokenizer, turn_end="STOP")


def test_a_token_without_effect(chatml_tokenizer, tmp_path, write_rows):
    """`turn_end` is refused where the template ends every turn itself."""
    rows = write_rows([{"messages": ROW["messages"][4:]}])
    with pytest.raises(DataError, match=r"^`turn_end` \('<\|im_end\|>'\) has no effect: no learned turn .* leave it out$"):
        prepare(rows, chatml_tokenizer, tmp_path / "store", turn_end="<|im_end|>", progress=False)
    assert not (tmp_path / "store").exists()


def test_its_weight_is_that_of_the_turn_it_ends(model):
    """The stop token is learned, and as much as its turn, whatever the message weighs that begins with it."""
    tokenizer = load_tokenizer(model)
    weights = [0, 0.5, 0, 2, 0, 0.25]
    messages = [message | {"weight": weight} for message, weight in zip(ROW["messages"], weights, strict=True)]
    example = tokenize({"messages": messages}, tokenizer)
    assert learned(tokenizer, example) == ["<tool_call>look</tool_call><|observation|>", "c<|user|>", "e<|user|>"]
    assert example.labels.tolist() == tokenize(ROW, tokenizer).labels.tolist()
    pieces = [len(tokenizer(text)["input_ids"]) for text in learned(tokenizer, example)]
    expected = [weight for weight, size in zip([0.5, 2, 0.25], pieces, strict=True) for _ in range(size)]
    assert example.weights[example.labels != -100].tolist() == expected
