"""Weights of rows and messages, from the row to the store, to JSONL and back."""

import json
import re

import numpy as np
import pytest

from forge_data import DataError, TokenStore, prepare, tokenize
from forge_data.preparing import _pipeline

USER = {"role": "user", "content": "hi"}


def bot(text, **more):
    return {"role": "assistant", "content": text, **more}


def chat(*answers, **row):
    """Make a conversation with an answer after each turn of the user's."""
    return {"messages": [turn for answer in answers for turn in (USER, answer)], **row}


def learned(row, tokenizer, **options):
    """List (token, weight) of what is learned of a row."""
    made = tokenize(row, tokenizer, **options)
    weights = np.ones(len(made)) if made.weights is None else made.weights
    assert made.weights is None or (made.weights.dtype == np.float32 and ((made.labels == -100) == (weights == 0)).all())
    return [(int(one), float(weight)) for one, weight in zip(made.labels, weights, strict=True) if one != -100]


def scaled(pairs, weight):
    """Multiply weights as float32 does."""
    return [(token, float(np.float32(each) * np.float32(weight))) for token, each in pairs]


@pytest.mark.parametrize("weight", [0.3, 2.0, 1e-30, 3])
def test_a_row(chatml_tokenizer, weight):
    """All that is learned of a row has its weight, in every format and under every train_on."""
    rows = [
        chat(bot("a b")),
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"prompt": "a", "completion": "b c"},
        {"prompt": [USER], "completion": [bot("b c")]},
        {"text": "some words"},
        {"input_ids": [3, 4, 5], "labels": [-100, 4, 5]},
    ]
    for row in rows:
        for train_on in ("assistant", "all"):
            plain = learned(row, chatml_tokenizer, train_on=train_on)
            assert learned(row | {"weight": weight}, chatml_tokenizer, train_on=train_on) == scaled(plain, weight)
            for none in (1, 1.0, None):
                assert tokenize(row | {"weight": none}, chatml_tokenizer, train_on=train_on).weights is None


def test_documents(chatml_tokenizer, write_rows, tmp_path):
    """A document's EOS counts as its other tokens do, as text and as token ids."""
    rows = [{"text": "some words", "weight": 0.5}, {"input_ids": [3, 4, 5], "weight": 2}, {"text": "x"}]
    store = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store", format="document", train_on="all")
    assert [None if one.weights is None else set(one.weights.tolist()) for one in store] == [{0.5}, {2.0}, None]


def test_messages(chatml_tokenizer):
    """Each answer, through the token that ends its turn, has its own weight, times that of the row."""
    plain = learned(chat(bot("a b"), bot("c d e"), bot("f")), chatml_tokenizer)
    first, second = len(learned(chat(bot("a b")), chatml_tokenizer)), len(learned(chat(bot("c d e")), chatml_tokenizer))
    rest = first + second
    row = chat(bot("a b", weight=0.3), bot("c d e", weight=2.0), bot("f"))
    assert learned(row, chatml_tokenizer) == [*scaled(plain[:first], 0.3), *scaled(plain[first:rest], 2), *plain[rest:]]
    row = chat(bot("a b", weight=0), bot("c d e", weight=0.5), bot("f", train=True), weight=4)
    assert learned(row, chatml_tokenizer) == [*scaled(plain[first:rest], 2), *scaled(plain[rest:], 4)]
    assert tokenize(chat(bot("a", weight=0), bot("b", weight=1)), chatml_tokenizer).weights is None


def test_one_sample_a_turn(qwen3, write_rows, tmp_path):
    """Where each answer becomes a sample of its own, each sample has the weight of its answer."""
    row = chat(bot("a b", weight=0.5), bot("c", weight=0), bot("d"), bot("e f"), weight=2)
    store = prepare(write_rows([row]), qwen3, tmp_path / "store", turns="auto")
    assert [None if one.weights is None else set(one.weights[one.labels != -100].tolist()) for one in store] == [
        None,
        {2.0},
        {2.0},
    ]
    whole = prepare(write_rows([row]), qwen3, tmp_path / "whole", turns="history")
    assert [set(one.weights[one.labels != -100].tolist()) for one in whole] == [{1.0, 2.0}]


def test_a_prompt_with_weights(chatml_tokenizer):
    """Weights of a prompt's messages stay with them where prompt and completion are joined."""
    row = {"prompt": [USER, bot("a", weight=0), USER], "completion": [bot("b", weight=0.5)]}
    assert {weight for _, weight in learned(row, chatml_tokenizer)} == {0.5}
    row = {"prompt": [USER, bot("a", weight=0.5), USER], "completion": [bot("b")]}
    assert tokenize(row, chatml_tokenizer).weights is None


def test_nothing_to_learn(chatml_tokenizer, write_rows, tmp_path):
    """A row of weight 0 is left out as any of which nothing is learned."""
    rows = [chat(bot("a")), chat(bot("b"), weight=0), {"messages": [USER, bot("c", weight=0)]}]
    store = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store")
    assert store.accounting.dropped == {"no_trained_token": 2}
    assert not (store.path / "weights.bin").exists()


def test_tokens(chatml_tokenizer):
    """Rows of token ids have a weight a token; one of 0 is not learned, and only what is learned counts."""
    row = {"input_ids": [3, 4, 5, 6], "labels": [-100, 4, 5, 6], "weights": [7, 0.5, 0, 1]}
    assert learned(row, chatml_tokenizer) == [(4, 0.5), (6, 1.0)]
    assert learned(row | {"weight": 4}, chatml_tokenizer) == [(4, 2.0), (6, 4.0)]
    assert tokenize(row | {"weights": [1, 1, 1, 1]}, chatml_tokenizer).weights is None


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 9])
@pytest.mark.parametrize("workers", [1, 2])
def test_through_the_store(write_rows, chatml_tokenizer, tmp_path, monkeypatch, limit, workers):
    """The store, its views, JSONL and a store made of that have the weights of each row alone, in any chunks."""
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", 200)
    rows = [chat(bot(f"{n} a b")) | ({"weight": 0.1 * n} if n % 5 == 3 else {}) for n in range(14)]
    options = {} if limit is None else {"max_seq_len": limit, "on_overflow": "split"}
    store = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store", num_proc=workers, **options)
    plain = prepare(
        write_rows([row | {"weight": 1} for row in rows], "plain.jsonl"), chatml_tokenizer, tmp_path / "b", **options
    )
    again = TokenStore.from_jsonl(store.to_jsonl(tmp_path / "tokens.jsonl"), tmp_path / "again", tokenizer=chatml_tokenizer)
    lines = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    for index, (one, other, line) in enumerate(zip(store, again, lines, strict=True)):
        row = int(store.source(index).rpartition(":")[2]) - 1
        weight = np.float32(rows[row].get("weight", 1))
        expected = None if weight == 1 else np.where(one.labels == -100, np.float32(0), weight)
        for weights in (one.weights, other.weights, store.select([index])[0].weights):
            assert expected is None if weights is None else np.array_equal(weights, expected)
        assert ("weights" in line) == (expected is not None)
    assert again.fingerprint == store.fingerprint
    assert store.fingerprint != plain.fingerprint
    assert store.sha256["loss_mask.bin"] == plain.sha256["loss_mask.bin"]
    store.verify()


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), True, "0.5", [1], 1e39, 1e-46])
def test_refused(chatml_tokenizer, value):
    """What is no weight is refused by its place, of a row, a message or a token."""
    rows = {
        "field weight is": chat(bot("a"), weight=value),
        r"field messages\[1\].weight is": chat(bot("a", weight=value)),
        r"field weights\[1\] is": {"input_ids": [1, 2], "labels": [1, 2], "weights": [1, value]},
    }
    for message, row in rows.items():
        with pytest.raises(DataError, match=f"^row: {message} .*; a weight is a finite number from 0"):
            tokenize(row, chatml_tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2], "weights": [1]}, "field weights is a list of 1, but input_ids holds 2 tokens"),
        ({"input_ids": [1, 2], "labels": [1, 2], "weights": 1}, "field weights is int 1; it must be a list of numbers"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": 2}, "field weight is 2, and preferences have no weights"),
        ({"prompt": "a", "completion": "b", "label": True, "weight": 0}, "field weight is 0, and preferences have no weights"),
        (
            {"prompt": [USER], "chosen": [bot("a", weight=0.5)], "rejected": [bot("b")]},
            "a message has the weight 0.5, and preferences have no weights but 0 and 1",
        ),
        (
            {"prompt": [USER], "completion": [bot("a", weight=0.5)], "label": True},
            "a message has the weight 0.5, and preferences have no weights but 0 and 1",
        ),
    ],
)
def test_refused_rows(chatml_tokenizer, row, message):
    """Weights are one a token, and preferences have none."""
    with pytest.raises(DataError, match=message):
        tokenize(row, chatml_tokenizer)


@pytest.mark.parametrize(("row", "own"), [(1e30, 1e30), (1e-30, 1e-30)])
def test_weights_whose_product_is_none(chatml_tokenizer, row, own):
    """Weights of a row and a message whose product float32 cannot hold are refused, and never infinite nor 0."""
    ids = {"input_ids": [3, 4], "labels": [-100, 4], "weights": [0, own]}
    what = re.escape(f"field weight is {row:g}, which times a weight of {own:g} within the row")
    for fields in (chat(bot("a", weight=own), weight=row), ids | {"weight": row}):
        with pytest.raises(DataError, match=what):
            tokenize(fields, chatml_tokenizer)


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
MARKED = (
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
)


@pytest.mark.parametrize("turn", [TURN, MARKED])
def test_a_turn_outside_of_the_loop_over_messages(with_template, turn):
    """The end of a turn has the turn's weight, also where a template counts messages and owns no text to them."""
    loop = "{% for i in range(messages | length) %}{% set m = messages[i] %}" + turn + "{% endfor %}"
    tokenizer = with_template(loop + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    plain = learned(chat(bot("a"), bot("b")), tokenizer)
    half = len(plain) // 2
    assert half > 1
    row = chat(bot("a", weight=0.5), bot("b", weight=2))
    assert learned(row, tokenizer) == [*scaled(plain[:half], 0.5), *scaled(plain[half:], 2)]
