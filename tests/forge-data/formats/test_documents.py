"""Documents of pretraining: text or tokens, all of it learned, one EOS at the end of each."""

import numpy as np
import pytest
from tokenizers import processors

from forge_data import DataError, lint, prepare
from forge_data.formats._documents import ended, is_empty
from forge_data.formats._samples import Document, Text, Tokens
from forge_data.preparing import _job as _work

EOS = "<|im_end|>"


def tokens(*ids):
    return Tokens("f:1", np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool), document=True)


def flat(store):
    """All documents one after the other, and where each ends."""
    return np.concatenate([example.input_ids for example in store]), np.cumsum(store.lengths)


@pytest.mark.parametrize("bos", [False, True])
def test_one_eos_between_documents(bos, write_rows, families, tmp_path):
    """In the concatenation of all documents one EOS ends each, and every token is learned.

    However they came: as text without an EOS or with one written out, as token ids with and without it.
    """
    tokenizer = families["llama-3"].tokenizer()
    eos, first = tokenizer.eos_token_id, [tokenizer.bos_token_id] if bos else []
    if bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)]
        )
    ids = tokenizer("hello there", add_special_tokens=False)["input_ids"]
    rows = [
        {"text": "hello there"},
        {"document": "hello there" + tokenizer.eos_token},
        {"input_ids": [*first, *ids]},
        {"input_ids": [*first, *ids, eos]},
        {"input_ids": [*first, *ids, eos], "labels": [*first, *ids, eos]},
    ]
    store = prepare(write_rows(rows), tokenizer, tmp_path / "store", format="document")
    row, ends = flat(store)
    assert np.flatnonzero(row == eos).tolist() == (ends - 1).tolist()
    assert [example.input_ids.tolist() for example in store] == [[*first, *ids, eos]] * 5
    assert all((example.labels == example.input_ids).all() for example in store)
    assert store.accounting.tokens_kept == len(row)


def test_every_term_is_counted(write_rows, chatml_tokenizer, tmp_path):
    """Each document counts one loss term a token but the first, so the sum is known without packing."""
    store = prepare(
        write_rows([{"text": f"{'é🎈 ' * n}end"} for n in range(1, 9)]), chatml_tokenizer, tmp_path / "s", format="document"
    )
    assert store.loss_counts.tolist() == (store.lengths - 1).tolist()


@pytest.mark.parametrize("with_bos", [False, True])
@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.parametrize("format", ["auto", "document"])
def test_empty_documents(with_bos, rows, format, write_rows, families, tmp_path, monkeypatch):
    """A document of blanks alone is left out by that reason, also where a BOS would make two tokens of it."""
    monkeypatch.setattr(_work, "_ROWS", rows)
    tokenizer = families["llama-3"].tokenizer()
    if with_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)]
        )
    path = write_rows([{"text": ""}, {"text": "a b"}, {"document": " \n\u3000"}, {"text": "c"}])
    store = prepare(path, tokenizer, tmp_path / "store", format=format)
    assert store.accounting.dropped == {"empty_document": 2}
    assert [(row["place"], row["reason"]) for row in store.dropped()] == [
        ("train.jsonl:1", "empty_document"),
        ("train.jsonl:3", "empty_document"),
    ]
    assert [store.source(at) for at in range(len(store))] == ["train.jsonl:2", "train.jsonl:4"]
    report = lint(path, tokenizer, format=format)
    assert [each.row for each in report.findings if each.rule == "no_trained_token"] == [1, 3]


def test_documents_of_no_tokens(write_rows, chatml_tokenizer, tmp_path):
    """An empty list of ids is an empty document; one EOS alone has nothing to learn."""
    rows = [{"input_ids": []}, {"input_ids": [5, 6]}, {"input_ids": [chatml_tokenizer.eos_token_id]}]
    store = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store", format="document")
    assert store.accounting.dropped == {"empty_document": 1, "no_trained_token": 1}


def test_ended():
    """An EOS is added where there is none, and learned; an existing one is enough."""
    added = ended(tokens(5, 6), 2, None)
    assert added.input_ids.tolist() == [5, 6, 2]
    assert added.input_ids.dtype == np.int32
    assert added.trained.tolist() == [True] * 3
    assert ended(tokens(5, 6, 2), 2, 1).input_ids.tolist() == [5, 6, 2]
    assert ended(tokens(2, 5, 2, 6), 2, 2).input_ids.tolist() == [2, 5, 2, 6, 2]
    for ids, expected in (
        ((5, 2, 2), "ends with the EOS token 2 2 times"),
        ((2, 2), "2 times"),
        ((2, 5), "begins with the EOS token 2"),
    ):
        with pytest.raises(
            DataError,
            match=f"f:1: field input_ids {expected if 'ends' in expected or 'begins' in expected else '.*' + expected}",
        ):
            ended(tokens(*ids), 2, 1)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a", "input_ids": [1]}, "train.jsonl:2 has both text and input_ids; keep the one"),
        ({"text": "a", "document": "b"}, "train.jsonl:2 has both text and document"),
        ({"text": 3}, "train.jsonl:2: field text is int 3"),
        ({"input_ids": [1, -5]}, r"train.jsonl:2: field input_ids\[1\] is -5, outside the vocabulary"),
        ({"input_ids": [1, 2.0]}, r"train.jsonl:2: field input_ids\[1\] is float 2.0"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "train.jsonl:2: attention_mask holds zeros, so the row is padded"),
        ({"input_ids": [1, 2], "labels": [1]}, "train.jsonl:2: input_ids holds 2 tokens and labels 1"),
        (
            {"messages": []},
            "train.jsonl:2: field messages is no document, which is one message of the assistant",
        ),
    ],
)
def test_refused(row, expected, write_rows, chatml_tokenizer, tmp_path):
    """A row that is not a document is refused by place."""
    with pytest.raises(DataError, match=expected):
        prepare(write_rows([{"text": "fine"}, row]), chatml_tokenizer, tmp_path / "store", format="document")


def test_is_empty():
    """Only documents can be empty: a blank prompt is another check's."""
    assert [is_empty(each) for each in (Document("f", ""), Document("f", "\t\n"), tokens())] == [True] * 3
    assert [is_empty(each) for each in (Document("f", " a"), tokens(1), Text("f", "", ""))] == [False] * 3
