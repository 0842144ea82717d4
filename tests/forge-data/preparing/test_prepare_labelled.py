"""`prepare_labelled`: texts and conversations are tokenised whole, as a classifier gets them, with their labels beside."""

import json

import pytest

from forge_data import DataError, PromptStore, prepare_labelled


def store_of(tmp_path, chatml_tokenizer, rows, **settings):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare_labelled(data, chatml_tokenizer, tmp_path / "store", **settings)


TEXTS = ["a short text", "a text that is longer than the short one"]


def test_whole(tmp_path, chatml_tokenizer):
    """A text has the tokens of `tokenizer(text)`, a conversation those of the template without a generation prompt; labels
    are as the rows give them, and other fields are not kept.
    """
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello to you"}]
    rows = [{"text": TEXTS[0], "label": "x", "id": 7}, {"text": TEXTS[1], "label": 3}, {"messages": talk, "label": "x"}]
    store = PromptStore.open(store_of(tmp_path, chatml_tokenizer, rows).path)
    for index, text in enumerate(TEXTS):
        assert store[index].input_ids.tolist() == chatml_tokenizer(text)["input_ids"]
    written = chatml_tokenizer.apply_chat_template(talk, tokenize=False)
    assert store[2].input_ids.tolist() == chatml_tokenizer(written, add_special_tokens=False)["input_ids"]
    assert [prompt.columns for prompt in store] == [{"label": "x"}, {"label": 3}, {"label": "x"}]


def test_too_long(tmp_path, chatml_tokenizer):
    """Longer texts are dropped and counted, cut, or an error; tokens add up."""
    lengths = [len(chatml_tokenizer(text)["input_ids"]) for text in TEXTS]
    rows = [{"text": text, "labels": ["x"]} for text in TEXTS]
    dropped = store_of(tmp_path, chatml_tokenizer, rows, max_seq_len=lengths[0])
    assert len(dropped) == 1
    assert dropped.accounting.dropped == {"longer_than_max_seq_len": 1}
    cut = store_of(tmp_path, chatml_tokenizer, rows, max_seq_len=lengths[0], on_overflow="truncate")
    assert cut[1].input_ids.tolist() == chatml_tokenizer(TEXTS[1])["input_ids"][: lengths[0]]
    assert cut.accounting.tokens_lost == {"truncated": lengths[1] - lengths[0]}
    with pytest.raises(DataError, match=rf"rows.jsonl:2: the text has {lengths[1]} tokens, and `max_seq_len` is {lengths[0]}"):
        store_of(tmp_path, chatml_tokenizer, rows, max_seq_len=lengths[0], on_overflow="error")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "label": 1.5}, "field label is float 1.5, which is no label"),
        ({"text": "a", "label": ["x", "y"]}, "the labels of a text that has several are the field labels"),
        ({"text": "a", "label": " "}, "field label is an empty text"),
        ({"text": "a", "labels": "x"}, "field labels is the string 'x'; it must be a list"),
        ({"text": "a", "labels": ["x", None]}, r"field labels\[1\] is null"),
        ({"text": "a", "labels": ["x", "x"]}, "field labels has the string 'x' twice"),
        ({"text": "a", "messages": [], "label": "x"}, "which are two"),
        ({"text": 3, "label": "x"}, "field text is int 3"),
        ({"text": "a"}, "and no label"),
    ],
)
def test_bad_rows(row, message, tmp_path, chatml_tokenizer):
    """A row that is no labelled text is named by its place, or left out, counted and listed where that is asked for."""
    good = [{"text": "a", "label": "x"}] * 3
    with pytest.raises(DataError, match=rf"rows.jsonl:4.*{message}"):
        store_of(tmp_path, chatml_tokenizer, [*good, row])
    store = store_of(tmp_path, chatml_tokenizer, [*good, row], on_bad_row="skip", max_bad_rows=0.5)
    assert len(store) == 3
    assert [dropped["row"] for dropped in store.dropped()] == [4]
