"""Rows with images, from any kind of file → the same samples; refused where nobody trains them."""

import hashlib
import json
import shutil

import datasets
import numpy as np
import pytest

from forge_data import DataError, TokenStore, check_first_row, lint, merge, prepare, prepare_prompts, tokenize
from forge_data.linting._sample_table import SampleTable

from ..pictured import pixels, png

pytestmark = pytest.mark.together

ANSWER = {"role": "assistant", "content": "a cat"}
MARKS = ("<image>", "<image_soft_token>")
MESSAGES = [{"role": "user", "content": "<image>what is in the picture?"}, ANSWER]


@pytest.fixture(scope="module")
def model(gemma3_directory):
    return str(gemma3_directory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """Three rows and a text, in a file beside the pictures that they name."""
    made = tmp_path_factory.mktemp("rows")
    rows = [{"messages": MESSAGES, "images": [f"pictures/{seed}.png"]} for seed in range(3)]
    rows.append({"messages": [{"role": "user", "content": "hello"}, ANSWER]})
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "pictures").mkdir()
    for seed in range(3):
        (made / f"pictures/{seed}.png").write_bytes(png(seed))
    return made


@pytest.fixture(scope="module")
def store(folder, model, tmp_path_factory):
    return prepare(folder / "train.jsonl", model, tmp_path_factory.mktemp("store"), media=True, progress=False)


def shown(store: TokenStore) -> list[tuple]:
    return [
        (example.input_ids.tolist(), [(image.sha256, image.start, image.stop) for image in example.media]) for example in store
    ]


def test_ends_of_turns_that_are_not_learned(store, folder, model, tmp_path):
    """The end moves with the text behind the tokens of an image; nothing else is left out."""
    none = prepare(folder / "train.jsonl", model, tmp_path / "store", media=True, progress=False, train_on_turn_end="none")
    for with_end, without in zip(store, none, strict=True):
        (gone,) = np.flatnonzero(with_end.labels != without.labels)
        assert gone == np.flatnonzero(with_end.labels != -100)[-1]


def test_paths_begin_beside_the_file(store, folder, monkeypatch, tmp_path, model):
    """Samples have the pictures that lie beside the file, in every process, and their lint finds nothing."""
    monkeypatch.chdir(tmp_path)
    assert [[image.path for image in example.media] for example in store] == [
        *([str(folder / f"pictures/{seed}.png")] for seed in range(3)),
        [],
    ]
    again = prepare(folder / "train.jsonl", model, tmp_path / "store", media=True, progress=False, num_proc=2)
    assert again.fingerprint == store.fingerprint
    assert not store.lint.counts
    (images, texts) = (np.array([sum(image.stop - image.start for image in each.media) for each in store]), store.lengths)
    assert SampleTable.of(store).text_lengths.tolist() == (texts - images).tolist()
    assert not lint(folder / "train.jsonl", model, media=True).counts


def test_rows_that_were_copied(folder, model, tmp_path, monkeypatch):
    """Equal rows elsewhere name other files: a store of theirs has these, also of rows in memory and of parts; a text stays."""
    for name in ("one", "other"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "other/pictures/0.png").write_bytes(png(7))

    def prepared(name, **options):
        monkeypatch.chdir(tmp_path / name)
        rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        given = {"file": tmp_path / name / "train.jsonl", "memory": rows, "texts": rows[3:]}
        stores = {kind: prepare(given[kind], model, tmp_path / kind, media=True, progress=False, **options) for kind in given}
        for kind in ("file", "memory"):
            assert stores[kind][0].media[0].path == str(tmp_path / name / "pictures/0.png")
        return [stores[kind].path.stat().st_ino for kind in given], stores["file"][0].media[0].sha256

    first, sha256 = prepared("one")
    assert prepared("one") == (first, sha256)
    others, changed = prepared("other")
    assert changed != sha256
    assert [one == other for one, other in zip(first, others, strict=True)] == [False, False, True]
    for number in (1, 2):
        part = prepare(
            tmp_path / "one/train.jsonl", model, tmp_path / str(number), media=True, progress=False, shard=f"{number}/2"
        )
        assert part.media_directories == [str(tmp_path / "one")]
    assert merge(tmp_path / "merged", [tmp_path / "1", tmp_path / "2"]).media_directories == [str(tmp_path / "one")]


def test_above_a_linked_directory(model, tmp_path):
    """`..` begins where a link leads to, as it does for every program."""
    (tmp_path / "far/pictures").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    (tmp_path / "near/link").symlink_to(tmp_path / "far/pictures")
    for name, seed in (("far", 1), ("near", 2)):
        (tmp_path / name / "a.png").write_bytes(png(seed))
    (tmp_path / "near/rows.jsonl").write_text(json.dumps({"messages": MESSAGES, "image": "link/../a.png"}) + "\n")
    (example,) = prepare(tmp_path / "near/rows.jsonl", model, tmp_path / "store", media=True, progress=False)
    assert example.media[0].sha256 == hashlib.sha256(png(1)).hexdigest()


@pytest.mark.parametrize("kind", ["parquet", "saved", "Dataset", "decoded", "list", "stream"])
def test_of_datasets(kind, store, model, tmp_path):
    """Images that `datasets` holds, encoded or decoded, are the samples of the files."""
    rows = [{"messages": MESSAGES, "images": [{"bytes": png(seed), "path": None}]} for seed in range(3)]
    made = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    given = {"Dataset": made, "decoded": made.with_transform(lambda batch: batch), "list": rows, "stream": iter(made)}
    if kind == "parquet":
        made.to_parquet(str(tmp_path / "train.parquet"))
        given[kind] = tmp_path / "train.parquet"
    elif kind == "saved":
        made.save_to_disk(tmp_path / "saved")
        given[kind] = tmp_path / "saved"
    found = shown(prepare(given[kind], model, tmp_path / "store", media=True, progress=False))
    expected = shown(store)[:3]
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    if kind in ("parquet", "saved", "Dataset", "list"):
        assert found == expected


def test_one_row(store, model):
    """A decoded picture of a row in memory."""
    example = tokenize({"messages": MESSAGES, "image": pixels(0)}, model, media=True)
    assert np.array_equal(example.input_ids, store[0].input_ids)
    assert [(image.start, image.stop) for image in example.media] == [(image.start, image.stop) for image in store[0].media]


def test_refused_where_they_are_not_trained(folder, model, tmp_path):
    """Without `images` the row is refused before and while it is read, and `images` is refused where it is no flag."""
    what = r"train.jsonl:1: field images is a list of 1, and only text is trained here: forge sft, osft, .* train images"
    with pytest.raises(DataError, match=what):
        prepare(folder / "train.jsonl", model, tmp_path / "store", progress=False)
    with pytest.raises(DataError, match=what):
        check_first_row(folder / "train.jsonl")
    with pytest.raises(DataError, match=what):
        prepare_prompts(folder / "train.jsonl", model, tmp_path / "store", rename_columns={"messages": "prompt"})
    assert [(each.rule, each.place) for each in lint(folder / "train.jsonl", model).findings][:1] == [
        ("unreadable_row", "train.jsonl:1")
    ]
    with pytest.raises(DataError, match=r"row: field messages\[0\].content\[0\] is .*, and only text is trained here"):
        tokenize({"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, ANSWER]}, model)
    check_first_row(folder / "train.jsonl", media=True)
    with pytest.raises(DataError, match="`media` is the string 'yes'; it must be true or false"):
        prepare(folder / "train.jsonl", model, tmp_path / "store", media="yes")


def test_the_lint_reads_the_texts_of_parts(model):
    """A mark of the model's in a text beside a picture is found, in its field; a picture alone is no empty turn."""
    image = {"type": "image", "image": pixels(0)}
    rows = [
        {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "a <start> b"}]}, ANSWER]},
        {"messages": [{"role": "user", "content": [image]}, ANSWER]},
        {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "Itâ€™s"}]}, ANSWER]},
    ]
    found = lint(rows, model, media=True).findings
    assert sorted((each.rule, each.row, each.field) for each in found) == [
        ("broken_unicode", 2, "messages[0].content"),
        ("special_token_in_text", 0, "messages[0].content"),
    ]


def test_a_token_of_an_image_in_a_text(model):
    """A text that holds what stands for an image stops a training with images, beside whose tokens it would be one too many."""
    rows = [{"messages": [{"role": "user", "content": "a <image_soft_token> b"}, ANSWER]}]
    (found,) = lint(rows, model, media=True).findings
    assert (found.rule, found.severity, found.field) == ("special_token_in_text", "stop", "messages[0].content")
    assert "'<image_soft_token>', which stands for a part of a medium of this model" in found.what
    (found,) = lint(rows, model).findings
    assert found.severity == "warn"


def test_a_mark_without_images(model):
    """`<image>` as letters is said of a row whose images may have another name, and of no row that has some."""
    rows = [{"messages": MESSAGES, **more} for more in ({"pictures": ["a.png"]}, {"image": None}, {"image": pixels(0)})]
    found = lint(rows, model, media=True).findings
    assert [(each.rule, each.row, each.field) for each in found if each.rule != "duplicate_row"] == [
        ("image_mark_in_text", row, "messages[0].content") for row in (0, 1)
    ]
    assert {each.rule for each in lint(rows[:2], model).findings} == {"duplicate_row"}


TEXTS = [
    ({"prompt": "a {} b", "completion": "c"}, "prompt"),
    ({"prompt": "a", "completion": "b {} c"}, "completion"),
    ({"prompt": "a {}", "chosen": "b", "rejected": "c"}, "prompt"),
    ({"prompt": "a", "chosen": "b", "rejected": "{} c"}, "rejected"),
    ({"prompt": "{} a", "completion": "b", "label": True}, "prompt"),
    ({"text": "{} a"}, "text"),
]


@pytest.mark.parametrize(("row", "field"), TEXTS)
def test_a_mark_and_a_token_in_rows_of_text(row, field, model):
    """As in messages, and at the ends of a text too, where marks of turns are meant: a mark is said, a token stops."""
    said = [{name: value.format(mark) if name == field else value for name, value in row.items()} for mark in MARKS]
    mark, token = (next(iter(lint([each], model, media=True).findings)) for each in said)
    assert (mark.rule, mark.severity, mark.field) == ("image_mark_in_text", "warn", field)
    assert (token.rule, token.severity, token.field) == ("special_token_in_text", "stop", field)
    assert not lint(said[:1], model).findings
    if field == "prompt":
        given = said[0] | {"image": pixels(0)}
        assert not lint([given], model, media=True).findings


def test_a_prompt_that_has_a_text(model, tmp_path):
    """The first one without images that says it, in a text or in messages, and not in its other fields."""
    asked = [{"role": "user", "content": [{"type": "text", "text": "a <video> b"}]}]
    rows = [{"prompt": "a", "answer": "<image>"}, {"prompt": "<image> b", "images": [pixels(0)]}, {"prompt": "<image>"}]
    rows += [{"prompt": asked}, {"prompt": [{"role": "user", "content": "<audio>"}]}]
    store = prepare_prompts(rows, model, tmp_path / "store", media=True)
    assert [store.first_with(f"<{kind}>") for kind in ("image", "video", "audio", "box")] == [2, 3, 4, None]
    assert store[3:].first_with("<audio>") == 1


def test_less_than_a_person_sees(model, tmp_path):
    """An image of 16 bits is found in its field, once, whichever of the row's samples have it."""
    deep = pytest.importorskip("PIL.Image").new("I;16", (9, 9), 900)
    sides = [{"role": "assistant", "content": text} for text in ("a cat", "a dog")]
    rows = [{"prompt": MESSAGES[:1], "chosen": sides[:1], "rejected": sides[1:], "image": deep}]
    (found,) = prepare(rows, model, tmp_path / "store", media=True, progress=False).lint.findings
    assert (found.rule, found.severity, found.place, found.field) == ("lossy_image", "warn", "data_path[0]", "image")
    assert "more than 8 bits a pixel" in found.what


def test_pairs(folder, model, tmp_path):
    """Both samples of a pair have the picture of its prompt; of one text, pairs with other pictures are no duplicates."""
    sides = [{"role": "assistant", "content": text} for text in ("a cat", "a dog")]
    row = {"prompt": MESSAGES[:1], "chosen": sides[:1], "rejected": sides[1:]}
    given = [row | {"images": [str(folder / f"pictures/{seed}.png")]} for seed in (0, 1, 0)]
    store = prepare(given, model, tmp_path / "store", media=True, progress=False)
    assert store.kind == "preference"
    assert {(each.rule, each.row) for each in store.lint.findings} == {("duplicate_row", 2)}
    assert np.array_equal(store[0].input_ids, store[2].input_ids)
    for chosen, rejected in store.pairs:
        assert store[chosen].media == store[rejected].media != ()
        learned = [store[side].labels != -100 for side in (chosen, rejected)]
        assert [sum(each.tolist()) for each in learned] == [4, 5]


def test_rated_answers(folder, model, tmp_path):
    """Each answer has the picture of its prompt, in any form of a row, in parts and in a split too."""
    files = [str(folder / f"pictures/{seed}.png") for seed in range(3)]
    mine = [{"prompt": MESSAGES[:1], "completion": [ANSWER], "label": seed > 0, "images": [files[seed]]} for seed in range(3)]
    text = {"prompt": [{"role": "user", "content": "hello"}], "completion": [ANSWER], "label": True}
    theirs = [{"messages": MESSAGES, "kto_tag": seed > 0, "images": [files[seed]]} for seed in range(3)]
    store = prepare([text, *mine, text], model, tmp_path / "store", media=True, progress=False)
    assert store.kind == "unpaired_preference"
    assert store.desirable.tolist() == [True, False, True, True, True]
    assert [[image.path for image in each.media] for each in store] == [[], *([file] for file in files), []]
    assert {(each.rule, each.row) for each in store.lint.findings} == {("duplicate_row", 4)}
    assert shown(prepare(theirs, model, tmp_path / "theirs", media=True, progress=False)) == shown(store)[1:4]
    parts = [tmp_path / f"part{number}" for number in (1, 2)]
    for number, part in enumerate(parts, 1):
        prepare([text, *mine, text], model, part, media=True, progress=False, shard=f"{number}/2")
    assert merge(tmp_path / "merged", parts).fingerprint == store.fingerprint
    for side in store.split(0.5):
        assert [bool(each.media) for each in side] == [index in (1, 2, 3) for index in side._indices.tolist()]
