"""`train_on=assistant,user`: what several roles say is learned, as under Axolotl's `roles_to_train`.

`axolotl` is `ChatTemplateStrategy._tokenize_single_prompt` and `find_turn` of Axolotl 0.18 (067b021c,
`prompt_strategies/chat_template.py`): a turn is where the ids of a conversation up to it differ from those with another text.
"""

import pytest
from hypothesis import given, strategies as st

import forge_data
from forge_data import DataError, DataSettings, PreferenceDataSettings

from ..families import FAMILIES

# Templates in which Axolotl's way finds what a turn says: it takes a header for content where a template writes the last turn
# otherwise (Qwen3), and leaves out a blank that a tokenizer puts before text behind a special token (Llama-2, Phi-3).
NAMES = ("chatml", "llama-3.1", "gemma", "mistral-nemo", "qwen2.5", "zephyr", "deepseek-r1-distill")
WORDS = st.lists(
    st.sampled_from("what is the capital of France Paris I do not know fine thank you".split()), min_size=1, max_size=6
)


def axolotl(tokenizer, messages, roles, ends, train_on_eos="turn"):
    """Axolotl's labels; `ends` are its EOS and eot_tokens, `train` of a message its message_field_training."""
    messages, flags = (
        [{"role": each["role"], "content": each["content"]} for each in messages],
        [each.get("train", each["role"] in roles) for each in messages],
    )

    def ids_of(turns):
        return tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)

    ids = ids_of(messages)
    labels = [-100] * len(ids)
    last = None
    for index, (message, train) in enumerate(zip(messages, flags, strict=True)):
        if not train and train_on_eos != "all":
            continue
        full = ids_of(messages[: index + 1])
        dummy = ids_of([*messages[:index], {"role": message["role"], "content": "[[dummy_message]]"}])
        least = min(len(full), len(dummy))
        start = next(at for at in range(least) if full[at] != dummy[at])
        stop = len(full) - next(at for at in range(least) if full[-1 - at] != dummy[-1 - at])
        if train:
            labels[start:stop] = ids[start:stop]
        end = next((at for at in range(stop, len(ids)) if ids[at] in ends), None)
        if end is not None and end - stop <= 3:
            last = end
            if train_on_eos == "all" or (train_on_eos == "turn" and train):
                labels[end] = ids[end]
    if train_on_eos == "last" and last is not None:
        labels[last] = ids[last]
    return ids, labels


@pytest.fixture(scope="module")
def by_family():
    """By family."""
    return {name: FAMILIES[name].tokenizer() for name in NAMES}


@given(
    name=st.sampled_from(NAMES),
    roles=st.sampled_from(["assistant,user", "user", "user,assistant"]),
    texts=st.lists(WORDS.map(" ".join), min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0),
)
def test_roles_to_train(by_family, name, roles, texts):
    """Labels are Axolotl's: contents of the roles' messages and the tokens that end them, no header of the template."""
    tokenizer = by_family[name]
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    answers = forge_data.tokenize({"messages": messages}, tokenizer, turns="history")
    ends = {tokenizer.eos_token_id, int(answers.labels[answers.labels != -100][-1])}
    example = forge_data.tokenize({"messages": messages}, tokenizer, train_on=roles, turns="history")
    assert (example.input_ids.tolist(), example.labels.tolist()) == axolotl(tokenizer, messages, roles.split(","), ends)


MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "thank you", "train": False},
]


@pytest.mark.parametrize(
    ("train_on", "learned"),
    [
        ("assistant", "Paris<|im_end|>"),
        ("user", "what<|im_end|>"),
        ("system,assistant", "be brief<|im_end|>Paris<|im_end|>"),
        ("user,assistant", "what<|im_end|>Paris<|im_end|>"),
        ("tool,assistant", "Paris<|im_end|>"),
    ],
)
def test_what_is_learned(chatml_tokenizer, train_on, learned):
    """Messages that are not to be trained are left out; a role that no message has changes nothing."""
    example = forge_data.tokenize({"messages": MESSAGES}, chatml_tokenizer, train_on=train_on)
    assert chatml_tokenizer.decode(example.labels[example.labels != -100]) == learned


def test_lint(chatml_tokenizer, write_rows):
    """A conversation that ends with a message of a role that is learned leaves nothing untrained."""
    rows = [{"messages": [*MESSAGES[:3], {"role": "user", "content": "thank you"}]}]
    for train_on, rules in (("assistant", {"untrained_last_turn"}), ("assistant,user", set())):
        assert {each.rule for each in forge_data.lint(write_rows(rows), chatml_tokenizer, train_on=train_on).findings} == rules


def test_rows_without_the_role(chatml_tokenizer, write_rows, tmp_path):
    """Where no row has anything to learn, the error says whose messages were looked for."""
    rows = write_rows([{"messages": MESSAGES}])
    with pytest.raises(DataError, match="`train_on` is 'tool,developer', and no message of developer or tool says anything"):
        forge_data.prepare(rows, chatml_tokenizer, tmp_path / "store", train_on="tool,developer")


@pytest.mark.parametrize("wrong", ["users", "assistant,users", "user,user", "last,user", "", ","])
def test_no_roles(chatml_tokenizer, wrong):
    """What is no list of roles is refused, by settings and by functions."""
    with pytest.raises(ValueError, match="train_on must be one of assistant, last, completion, all, or roles with commas"):
        DataSettings(data_path="x", train_on=wrong)
    with pytest.raises(DataError, match="`train_on` must be one of assistant"):
        forge_data.tokenize({"messages": MESSAGES}, chatml_tokenizer, train_on=wrong)


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b"}])
def test_text_has_no_roles(chatml_tokenizer, row):
    """In rows of plain text nobody's role is known; preferences learn answers alone."""
    chosen = "axolotl:alpaca" if "output" in row else "auto"
    with pytest.raises(DataError, match="`train_on` is 'user,assistant', and the row is text"):
        forge_data.tokenize(row, chatml_tokenizer, format=chosen, train_on="user,assistant")
    with pytest.raises(ValueError, match="train_on='user' learns the prompt too"):
        PreferenceDataSettings(data_path="x", train_on="user")
