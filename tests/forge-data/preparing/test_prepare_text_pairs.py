"""`prepare_text_pairs`: queries and documents are tokenised as an embedding model gets them, each by itself."""

import itertools
import json

import pytest

from forge_data import DataError, PromptStore, check_first_row, prepare_text_pairs


def store_of(tmp_path, tokenizer, rows, **settings):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare_text_pairs(data, tokenizer, tmp_path / "store", **settings)


def texts_of(prompt):
    """Return the tokens of each text of a row."""
    ends = [0, *itertools.accumulate(prompt.columns["lengths"])]
    return [prompt.input_ids[begin:end].tolist() for begin, end in itertools.pairwise(ends)]


def test_names_and_negatives(tmp_path, chatml_tokenizer):
    """Every name of a query and of a document, and hard negatives in each form; tokens are those of `tokenizer(text)`."""
    rows = [
        {"query": "one", "positive": "the first", "id": 3},
        {"anchor": "two", "document": "the second", "negative": "the third one"},
        {"question": "three", "answer": "the third", "negatives": ["a", "the fourth"]},
        {"anchor": "four", "positive": "the fourth", "negative_10": "y", "negative_2": "x"},
        {"anchor": "five", "positive": "the fifth", "negative": None, "negatives": []},
    ]
    store = PromptStore.open(store_of(tmp_path, chatml_tokenizer, rows).path)
    wanted = [
        ["one", "the first"],
        ["two", "the second", "the third one"],
        ["three", "the third", "a", "the fourth"],
        ["four", "the fourth", "x", "y"],
        ["five", "the fifth"],
    ]
    for prompt, texts in zip(store, wanted, strict=True):
        assert texts_of(prompt) == chatml_tokenizer(texts)["input_ids"]
        assert [prompt.prompt, prompt.columns["positive"], *prompt.columns["negatives"]] == texts


def test_prefixes_are_part_of_the_texts_and_of_the_store(tmp_path, chatml_tokenizer):
    """A prefix stands before each text of its kind, and another one makes another store."""
    rows = [{"query": "one", "positive": "two", "negative": "three"}]
    plain = store_of(tmp_path, chatml_tokenizer, rows).fingerprint
    store = store_of(tmp_path, chatml_tokenizer, rows, query_prefix="query: ", document_prefix="passage: ")
    assert texts_of(store[0]) == chatml_tokenizer(["query: one", "passage: two", "passage: three"])["input_ids"]
    assert store.fingerprint != plain


def test_an_end_token_is_the_tokenizers(tmp_path, chatml_tokenizer):
    """A tokenizer that ends each text by a token of its own does so here, and a cut text has that token still."""
    from copy import deepcopy

    from tokenizers.processors import TemplateProcessing

    ending = deepcopy(chatml_tokenizer)
    end = ending.eos_token
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, ending.eos_token_id)]
    )
    rows = [{"query": "one two three four five six seven", "positive": "two"}]
    whole = store_of(tmp_path, ending, rows)
    assert all(ids[-1] == ending.eos_token_id for ids in texts_of(whole[0]))
    cut = store_of(tmp_path, ending, rows, max_seq_len=4, on_overflow="truncate")
    assert ending.backend_tokenizer.truncation is None
    assert texts_of(cut[0]) == ending(["one two three four five six seven", "two"], truncation=True, max_length=4)["input_ids"]
    assert texts_of(cut[0])[0] == [*texts_of(whole[0])[0][:3], ending.eos_token_id]
    assert cut.accounting.tokens_lost == {"truncated": len(whole[0]) - len(cut[0])}


def test_too_long(tmp_path, chatml_tokenizer):
    """A row with one longer text is dropped and counted, or an error; a row as long in all is not."""
    rows = [{"query": "a short text", "positive": "a short text"}, {"query": "a", "positive": "a text that is much longer"}]
    limit = len(chatml_tokenizer("a short text")["input_ids"])
    dropped = store_of(tmp_path, chatml_tokenizer, rows, max_seq_len=limit)
    assert len(dropped) == 1
    assert dropped.accounting.dropped == {"longer_than_max_seq_len": 1}
    with pytest.raises(DataError, match=r"rows.jsonl:2: the text has \d+ tokens, and `max_seq_len` is"):
        store_of(tmp_path, chatml_tokenizer, rows, max_seq_len=limit, on_overflow="error")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "a"}, r"no document \(positive, document, answer\)"),
        ({"positive": "a"}, r"no query \(query, anchor, question\)"),
        ({"query": "a", "anchor": "b", "positive": "c"}, "query and anchor both name its query; keep one"),
        ({"query": "a", "positive": "b", "answer": "c"}, "positive and answer both name its document"),
        ({"query": 3, "positive": "b"}, "field query is int 3"),
        ({"query": "a", "positive": " "}, "field positive is an empty text"),
        ({"query": "a", "positive": "b", "negatives": "c"}, "field negatives is the string 'c'; it must be a list"),
        ({"query": "a", "positive": "b", "negatives": ["c", ""]}, r"field negatives\[1\] is an empty text"),
        ({"query": "a", "positive": "b", "negative": "c", "negatives": ["d"]}, "negative and negatives; give"),
        ({"text": "a", "label": "b"}, "a text with a label is for loss=batch_all_triplet"),
        ({"sentence1": "a", "sentence2": "b"}, "rename_columns"),
    ],
)
def test_bad_rows(row, message, tmp_path, chatml_tokenizer):
    """A row that is no pair is named by its place, or left out, counted and listed where that is asked for."""
    good = [{"query": "a", "positive": "b"}] * 3
    with pytest.raises(DataError, match=rf"rows.jsonl:4.*{message}"):
        store_of(tmp_path, chatml_tokenizer, [*good, row])
    store = store_of(tmp_path, chatml_tokenizer, [*good, row], on_bad_row="skip", max_bad_rows=0.5)
    assert len(store) == 3
    assert [dropped["row"] for dropped in store.dropped()] == [4]
    (tmp_path / "first.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"first.jsonl:1.*{message}"):
        check_first_row(str(tmp_path / "first.jsonl"), pairs=True)


def test_shown_and_not_linted(tmp_path, chatml_tokenizer, capsys):
    """`forge data show` shows the texts; lint says that nothing of them is learned."""
    from forge_data.cli._parser import main

    store = store_of(tmp_path, chatml_tokenizer, [{"query": "alpha", "positive": "beta", "negative": "gamma"}])
    assert main(["show", str(store.path)]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("alpha", "beta", "gamma", "lengths"))
    assert main(["lint", str(store.path)]) == 2
