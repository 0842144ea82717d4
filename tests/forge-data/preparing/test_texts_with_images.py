"""Labelled texts and queries with images: their ids are the processor's own, and each image belongs to its text."""

import itertools
import json

import attrs
import pytest
from transformers import AutoProcessor

from forge_data import (
    DataError,
    MediaInputs,
    PromptStore,
    TokenizerError,
    check_first_row,
    prepare_labelled,
    prepare_text_pairs,
)

from ..pictured import png

pytestmark = pytest.mark.together


@pytest.fixture(scope="module")
def model(gemma3_directory):
    return str(gemma3_directory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two images."""
    made = tmp_path_factory.mktemp("rows")
    for seed in range(2):
        (made / f"{seed}.png").write_bytes(png(seed, height=20 + 9 * seed))
    return made


def image(seed):
    return {"type": "image", "image": f"{seed}.png"}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return [{"role": "user", "content": [*parts]}]


def plain(model, folder, messages):
    """Ids and arrays that transformers' processor makes of messages."""
    from PIL import Image

    messages = json.loads(json.dumps(messages))
    for part in (part for message in messages for part in message["content"] if part["type"] == "image"):
        part["image"] = Image.open(folder / part["image"])
    made = AutoProcessor.from_pretrained(model).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="np"
    )
    return made.pop("input_ids")[0].tolist(), {name: made[name] for name in made if name != "attention_mask"}


def compare(found, wanted, inputs, media, place):
    """Compare a text's tokens and arrays with the processor's."""
    ids, arrays = wanted
    assert found.tolist() == ids, place
    sample = attrs.make_class("Sample", ["input_ids", "media"])(found, media)
    made = inputs(sample, place)
    assert made.keys() == arrays.keys()
    assert all((made[name] == arrays[name]).all() for name in made)


def written(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def test_labelled(model, folder, tmp_path):
    """Images in messages, in a column for a text, and alone; a text without is tokenized as it is."""
    rows = [
        {"messages": user(text("hello"), image(0)), "label": "a"},
        {"text": "what is <image> in the picture?", "images": ["1.png"], "label": "b"},
        {"image": "0.png", "label": "a"},
        {"text": "hello world", "label": "b"},
    ]
    store = prepare_labelled(written(folder, rows), model, tmp_path / "store", media=True)
    inputs = MediaInputs(model)
    wanted = [
        user(text("hello"), image(0)),
        user(text("what is "), image(1), text(" in the picture?")),
        user(image(0)),
    ]
    for prompt, messages in zip(store[:3], wanted, strict=True):
        compare(prompt.input_ids, plain(model, folder, messages), inputs, prompt.media, "a text")
    tokenizer = inputs._processor._processor.tokenizer
    assert store[3].input_ids.tolist() == tokenizer("hello world")["input_ids"]
    assert [prompt.columns["label"] for prompt in store] == ["a", "b", "a", "b"]
    assert [store.columns(index) for index in range(4)] == [{"label": label} for label in "abab"]
    assert store.media_counts[:, 0].tolist() == [1, 1, 1, 0]


def test_labelled_texts_are_cut_before_an_image(model, folder, tmp_path):
    """One that would be cut is left out of the text, and the rest is as it was."""
    rows = [{"messages": user(text("hello"), image(0), text("and"), image(1)), "label": label} for label in "ab"]
    whole = prepare_labelled(written(folder, rows), model, tmp_path / "whole", media=True)
    first, second = whole[0].media
    limit = second.start + 2
    cut = prepare_labelled(
        folder / "rows.jsonl", model, tmp_path / "cut", media=True, max_seq_len=limit, on_overflow="truncate"
    )
    assert cut[0].input_ids.tolist() == whole[0].input_ids[: second.start].tolist()
    assert cut[0].media == (first,)
    assert PromptStore.open(tmp_path / "cut")[1].prompt[0]["content"][1]["image"] == str(folder / "0.png")


def test_pairs(model, folder, tmp_path):
    """Every form of a text with images, as query, document and negative; strings are the user's messages where it is said."""
    rows = [
        {"query": "hello", "positive": user(image(0)), "negatives": ["world", user(text("a"), image(1), text("b"))]},
        {"query": [image(0), text("and a cat")], "positive": {"image": "1.png", "text": "a dog"}},
        {"query": {"image": ["0.png", "1.png"]}, "positive": "a cat", "negative": {"bytes": None, "path": "1.png"}},
    ]
    wanted = [
        [user(text("hello")), user(image(0)), user(text("world")), user(text("a"), image(1), text("b"))],
        [user(image(0), text("and a cat")), user(image(1), text("a dog"))],
        [user(image(0), image(1)), user(text("a cat")), user(image(1))],
    ]
    data, inputs = written(folder, rows), MediaInputs(model)
    store = prepare_text_pairs(data, model, tmp_path / "store", media=True, as_messages=True)
    for prompt, texts in zip(store, wanted, strict=True):
        ends = [0, *itertools.accumulate(prompt.columns["lengths"])]
        for (begin, end), messages in zip(itertools.pairwise(ends), texts, strict=True):
            own = tuple(
                attrs.evolve(each, start=each.start - begin, stop=each.stop - begin)
                for each in prompt.media
                if begin <= each.start < end
            )
            compare(prompt.input_ids[begin:end], plain(model, folder, messages), inputs, own, "a text")
            assert len(own) == sum(part["type"] == "image" for part in messages[0]["content"])
    assert store[0].columns["negatives"][1][0]["content"][1] == {"type": "image", "image": str(folder / "1.png")}
    tokenizer = inputs._processor._processor.tokenizer
    strings = prepare_text_pairs(data, model, tmp_path / "strings", media=True)
    assert strings[0].input_ids[: strings[0].columns["lengths"][0]].tolist() == tokenizer("hello")["input_ids"]


def test_a_prefix_is_the_system_message(model, folder, tmp_path):
    """Before messages, as sentence-transformers puts its prompts there."""
    data = written(folder, [{"query": [image(0)], "positive": "a cat"}])
    store = prepare_text_pairs(data, model, tmp_path / "store", media=True, as_messages=True, query_prefix="a dog")
    ids, _ = plain(model, folder, [{"role": "system", "content": [text("a dog")]}, *user(image(0))])
    assert store[0].input_ids[: store[0].columns["lengths"][0]].tolist() == ids


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q", "positive": "p", "image": "0.png"}, "of no text of the row.*rename_columns: image=positive"),
        ({"query": {"picture": "0.png"}, "positive": "p"}, "field query is an object with 'picture'"),
        ({"query": 7, "positive": "p"}, "field query is .*must be a string"),
        ({"query": [image(0)], "positive": user(text(""))}, "field positive holds neither text nor media"),
        ({"query": "a", "positive": {"image": []}}, "field positive holds neither text nor media"),
        ({"query": "a", "positive": {}}, "field positive holds neither text nor media"),
        ({"query": "a", "positive": []}, "field positive holds neither text nor media"),
        ({"query": [image(9)], "positive": "p"}, "9.png"),
        ({"query": [image(0)], "positive": "a <image_soft_token>"}, "a text of the row has '<image_soft_token>' in it"),
        ({"query": [{"type": "image"}], "positive": "p"}, "does not say which"),
        (
            {"query": user(text("q")), "positive": "p"},
            "field query is a list of 1 without media, and a text of this model is a",
        ),
    ],
)
def test_refused(row, message, model, folder, tmp_path):
    """By file and row."""
    data = written(folder, [row])
    with pytest.raises(DataError, match=message) as raised:
        prepare_text_pairs(data, model, tmp_path / "store", media=True)
    assert "rows.jsonl:1" in str(raised.value)


def test_messages_are_not_cut(model, folder, tmp_path):
    """What ends them is what an embedding is read from."""
    data = written(folder, [{"query": [image(0)], "positive": "a cat"}])
    labelled = written(folder, [{"text": "a cat", "label": "a"}], "labelled.jsonl")
    for prepare, rows in ((prepare_text_pairs, data), (prepare_labelled, labelled)):
        with pytest.raises(DataError, match="is of messages, which the chat template ends, and cannot be cut"):
            prepare(rows, model, tmp_path / "store", media=True, as_messages=True, max_seq_len=5, on_overflow="truncate")


def test_not_without_being_asked_for(model, folder, tmp_path, chatml_tokenizer):
    """Rows with images are refused where nobody trains on them, and by models without a processor."""
    data = written(folder, [{"query": [image(0)], "positive": "p"}])
    with pytest.raises(DataError, match="field query is a list of 1; it must be a string"):
        prepare_text_pairs(data, model, tmp_path / "store")
    with pytest.raises(TokenizerError, match="processor"):
        prepare_text_pairs(data, chatml_tokenizer, tmp_path / "store", media=True)
    check_first_row(data, pairs=True, media=True)
    labelled = written(folder, [{"messages": user(image(0)), "label": "a"}], "labelled.jsonl")
    check_first_row(labelled, labelled=True, media=True)
    with pytest.raises(DataError, match="only text is trained here"):
        check_first_row(labelled, labelled=True)
