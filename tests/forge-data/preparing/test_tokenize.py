"""One row in memory."""

from array import array

import numpy as np
import pytest

from forge_data import DataError, tokenize


def test_a_row(chatml_tokenizer, chat):
    """The arrays are int32; the label is the id where it is learned and -100 elsewhere."""
    example = tokenize(chat(("user", "hi"), ("assistant", "ho")), chatml_tokenizer)
    assert example.input_ids.dtype == example.labels.dtype == np.int32
    seen = example.labels != -100
    assert (example.labels[seen] == example.input_ids[seen]).all()
    assert 0 < example.loss_count == seen.sum() < len(example)


def test_tokens_come_through(chatml_tokenizer):
    """A row of token ids is checked and kept, beside fields that are None."""
    example = tokenize({"input_ids": [5, 6], "labels": [-100, 6], "messages": None}, chatml_tokenizer)
    assert (example.input_ids.tolist(), example.labels.tolist()) == ([5, 6], [-100, 6])
    with pytest.raises(DataError, match=r"row: field input_ids\[0\] is 403, outside the vocabulary 0 to 402"):
        tokenize({"input_ids": [403, 6], "labels": [-100, 6]}, chatml_tokenizer)


@pytest.mark.parametrize("kind", [tuple, np.array, lambda ids: array("i", ids)])
def test_token_ids_of_any_sequence(chatml_tokenizer, kind):
    """Ids may be what `prepare` takes in rows in memory: tuples and arrays of any library."""
    example = tokenize({"input_ids": kind([1, 2, 3]), "labels": kind([-100, 2, 3])}, chatml_tokenizer)
    assert (example.input_ids.tolist(), example.labels.tolist()) == ([1, 2, 3], [-100, 2, 3])


def test_by_directory(chatml_tokenizer, chat, tmp_path):
    """The tokenizer may be given as a directory."""
    chatml_tokenizer.save_pretrained(tmp_path)
    row = chat(("user", "hi"), ("assistant", "ho"))
    assert tokenize(row, str(tmp_path)).labels.tolist() == tokenize(row, chatml_tokenizer).labels.tolist()
    assert tokenize(row, tmp_path).labels.tolist() == tokenize(row, chatml_tokenizer).labels.tolist()


def test_length(chatml_tokenizer, chat):
    """A row of exactly max_seq_len tokens is kept, one more is refused, nothing is cut."""
    row = chat(("user", "hi"), ("assistant", "ho"))
    size = len(tokenize(row, chatml_tokenizer))
    assert len(tokenize(row, chatml_tokenizer, max_seq_len=size)) == size
    with pytest.raises(DataError, match=f"row: {size} tokens, and `max_seq_len` is {size - 1}; raise it, shorten"):
        tokenize(row, chatml_tokenizer, max_seq_len=size - 1)
    cut = tokenize(row, chatml_tokenizer, max_seq_len=size - 1, on_overflow="truncate")
    assert cut.input_ids.tolist() == tokenize(row, chatml_tokenizer).input_ids[:-1].tolist()
    with pytest.raises(DataError, match=r"row: no token of it is learned within `max_seq_len` \(3 tokens\)"):
        tokenize(row, chatml_tokenizer, max_seq_len=3, on_overflow="truncate")
    long = chat(("user", "hi"), ("assistant", "ho " * 50))
    with pytest.raises(DataError, match=r"row: it becomes \d+ samples of 20 tokens; prepare makes them all"):
        tokenize(long, chatml_tokenizer, max_seq_len=20, on_overflow="split")


def test_options(chatml_tokenizer, chat):
    """Format and train_on are those of prepare, and so are their errors."""
    row = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    every = tokenize(row, chatml_tokenizer, format="messages")
    last = tokenize(row, chatml_tokenizer, train_on="last")
    whole = tokenize(row, chatml_tokenizer, train_on="all")
    assert last.loss_count < every.loss_count < whole.loss_count == len(whole) - 1
    with pytest.raises(DataError, match="`format` is 'chat'; allowed"):
        tokenize(row, chatml_tokenizer, format="chat")
    with pytest.raises(DataError, match="row has the fields 'messages', but the format text needs text or document"):
        tokenize(row, chatml_tokenizer, format="text")


def test_preprocess(chatml_tokenizer, chat):
    """The function gets the row first; it must return one row."""
    row = {"question": "hi", "answer": "ho"}

    def turned(fields):
        return chat(("user", fields["question"]), ("assistant", fields["answer"]))

    made = tokenize(row, chatml_tokenizer, preprocess=turned)
    assert made.input_ids.tolist() == tokenize(turned(row), chatml_tokenizer).input_ids.tolist()
    for back in (None, [row, row]):
        with pytest.raises(DataError, match=r"row: `preprocess` returned [02] rows; tokenize makes one sample of one row"):
            tokenize(row, chatml_tokenizer, preprocess=lambda _, back=back: back)


def test_a_preference(chatml_tokenizer):
    """A row of two answers is two samples, for which there is prepare."""
    with pytest.raises(DataError, match="row: a row of preference becomes two samples, chosen and rejected"):
        tokenize({"prompt": "a", "chosen": "b", "rejected": "c"}, chatml_tokenizer)


def test_nothing_to_learn(chatml_tokenizer, chat):
    """A row without a learned token is refused; a first label does not count."""
    with pytest.raises(DataError, match="row: no token of it is learned; it needs an assistant turn"):
        tokenize(chat(("system", "x"), ("user", "hi")), chatml_tokenizer)
    with pytest.raises(DataError, match="no token of it is learned"):
        tokenize({"input_ids": [5, 6], "labels": [5, -100]}, chatml_tokenizer)


@pytest.mark.parametrize("limit", [0, -1, True, 2.5, "9"])
def test_limit(chatml_tokenizer, limit):
    """A limit is a positive whole number."""
    with pytest.raises(DataError, match="`max_seq_len` must be a whole number of at least 1"):
        tokenize({"prompt": "a", "completion": "b"}, chatml_tokenizer, max_seq_len=limit)


@pytest.mark.parametrize(("given", "message"), [([{"text": "x"}], "list"), ("Hi", "Hi"), (None, "null|None")])
def test_what_is_no_row(chatml_tokenizer, given, message):
    """Rows in a list, or a text, are refused as such."""
    with pytest.raises(DataError, match=f"row is .*({message}).*it must be one row"):
        tokenize(given, chatml_tokenizer)
