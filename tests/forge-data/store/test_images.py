"""Stores of rows with images: what is kept, what it is compared by, and what is refused."""

import base64
import json
import pickle
import shutil

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_data import DataError, Media, StoreError, TokenStore, lint, load_tokenizer, merge, prepare
from forge_data.store._manifest import MEDIA_FILE_OFFSETS, MEDIA_OFFSETS
from forge_data.store._media import arrays_of_media, media_at

from ..pictured import ONE_A_TURN, png

pytestmark = pytest.mark.together

pytest.importorskip("PIL")
START = "<start_of_image>"


@pytest.fixture
def data(tmp_path):
    """A folder of images, and rows that name them or hold them."""
    (tmp_path / "pictures").mkdir()
    for seed in range(4):
        (tmp_path / "pictures" / f"{seed}.png").write_bytes(png(seed))
    return tmp_path


def row(question, answer, *images):
    parts = [{"type": "image", "path": image} for image in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}, said(answer)]}


def said(answer):
    return {"role": "assistant", "content": answer}


def text(question, answer):
    return {"messages": [{"role": "user", "content": question}, said(answer)]}


def inline(question, answer, seed):
    url = "data:image/png;base64," + base64.b64encode(png(seed)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, said(answer)]}


ROWS = [
    text("hello", "hi"),
    row("what?", "a cat", "pictures/0.png"),
    text("and", "so"),
    inline("where?", "here", 2),
    row("both?", "yes", "pictures/1.png", "pictures/3.png"),
    text("end", "bye"),
]


def write(data, rows=ROWS):
    (data / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return data / "rows.jsonl"


@pytest.fixture
def make(data, gemma3_directory):
    def prepared(rows=ROWS, name="store", **options):
        options = {"media": True, "progress": False} | options
        return prepare(write(data, rows), options.pop("tokenizer", gemma3_directory), data / name, **options)

    return prepared


def test_images_of_samples(make, data):
    """A sample's images are those of its row: path or bytes, hash, tokens; other samples have none."""
    store = make()
    assert store.has_media
    assert [len(example.media) for example in store] == [0, 1, 0, 1, 2, 0]
    (named,), (held,) = store[1].media, store[3].media
    assert (named.path, named.data) == (str(data / "pictures" / "0.png"), None)
    assert (held.path, held.data) == (None, png(2))
    assert named.field == "messages[0].content[0]"
    for index in (1, 3, 4):
        for image in store[index].media:
            assert START in store.tokenizer().decode(store[index].input_ids[image.start : image.stop])
    store.verify()
    assert pickle.loads(pickle.dumps(store[4])).media == store[4].media
    assert pickle.loads(pickle.dumps(store))[4].media == store[4].media


def test_views(make):
    """Views have the images of their samples, and say whether there are any."""
    store = make()
    assert [len(example.media) for example in store.select([4, 0, 1])] == [2, 0, 1]
    assert not store.select([0, 2]).has_media
    assert store[2:4].has_media
    assert not make([text("a", "b")], "texts").has_media
    assert "images.bin" not in make([text("a", "b")], "texts").sha256


def test_versions(make):
    """A store with images has a version that earlier releases refuse; one without keeps theirs."""
    assert json.loads((make().path / "store.json").read_text())["version"] == 6
    assert json.loads((make([text("a", "b")], "texts").path / "store.json").read_text())["version"] == 4


@pytest.mark.parametrize("rows", [ROWS, ROWS[::-1], ROWS[1:2], [ROWS[0]] * 3 + [ROWS[1]]])
def test_parts_and_processes(make, data, rows):
    """Any number of parts, merged, and any number of processes make the same files, byte for byte."""
    whole = make(rows)
    for number in (1, 2, 3):
        make(rows, f"part{number}", shard=f"{number}/3")
    merged = merge(data / "merged", [data / f"part{number}" for number in (1, 2, 3)])
    assert merged.sha256 == whole.sha256
    assert merged.inputs == whole.inputs
    assert [example.media for example in merged] == [example.media for example in whole]


@pytest.mark.slow
def test_workers(make):
    """Workers read images as this process does."""
    assert make(name="two", num_proc=2).sha256 == make().sha256


def test_fingerprints(make, data, gemma3_directory):
    """The fingerprint follows the bytes of images, and neither their paths nor how a row gives them."""
    store = make()
    moved = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "path": "elsewhere.png"}, {"type": "text", "text": "what?"}]},
                said("a cat"),
            ]
        }
        if each is ROWS[1]
        else each
        for each in ROWS
    ]
    shutil.copy(data / "pictures" / "0.png", data / "elsewhere.png")
    assert make(moved, "moved").fingerprint == store.fingerprint
    assert make([*ROWS[:3], inline("where?", "here", 3), *ROWS[4:]], "other").fingerprint != store.fingerprint


def test_opened_again(make, data):
    """A store is opened again where nothing changed; a changed image file makes it anew, a missing one is an error."""
    store = make()
    stamp = (store.path / "store.json").stat().st_mtime_ns
    again = make()
    assert (again.path / "store.json").stat().st_mtime_ns == stamp
    (data / "pictures" / "1.png").write_bytes(png(9))
    anew = make()
    assert anew.inputs == store.inputs
    assert anew.fingerprint != store.fingerprint
    (data / "pictures" / "1.png").unlink()
    with pytest.raises(
        DataError, match=r"rows.jsonl:5: field messages\[0\].content\[0\]: .*1.png cannot be read: No such file"
    ):
        make()


def test_another_processor(make, data, gemma3_directory):
    """Other settings of the processor are other inputs, so that no store is opened again; a text's are the same."""
    other = data / "model"
    shutil.copytree(gemma3_directory, other)
    config = json.loads((other / "processor_config.json").read_text())
    (other / "processor_config.json").write_text(json.dumps(config | {"image_seq_length": 2}))
    first, second = make(), make(name="other", tokenizer=other)
    assert first.inputs != second.inputs
    assert first.lengths[1] == second.lengths[1] + 2
    plain = [
        make([text("a", "b")], name, tokenizer=tokenizer, media=False)
        for name, tokenizer in (("a", gemma3_directory), ("b", other))
    ]
    assert plain[0].inputs == plain[1].inputs


def test_duplicates(make):
    """Rows of one text are the same where their images are: for the lint, and for a split."""
    rows = [row("what?", "a cat", f"pictures/{seed}.png") for seed in (0, 1, 0, 2)]
    store = make(rows)
    found = [each for each in store.lint.findings if each.rule == "duplicate_row"]
    assert [each.place for each in found] == [store.source(2)]
    _, digests = store.units()
    assert digests[0] == digests[2]
    assert len(np.unique(digests)) == 3
    train, held_out = store.split(0.5)
    sides = [index for part in (train, held_out) for index in part._indices.tolist()]
    assert sorted(sides) == [0, 1, 2, 3]
    assert {0, 2} <= set(train._indices.tolist()) or {0, 2} <= set(held_out._indices.tolist())


def test_overlap(make):
    """A held-out row of the same text is trained on only where its images are the same."""
    store, others = (
        make([row("what?", "a cat", "pictures/0.png")]),
        [row("what?", "a cat", f"pictures/{seed}.png") for seed in (0, 1)],
    )
    report = lint(store, eval_data=make(others, "eval"))
    assert [each.place for each in report.findings if each.rule == "train_eval_overlap"] == ["rows.jsonl:1"]


def test_shared(make, gemma3_directory):
    """Turns of a row share their first tokens with their images."""
    tokenizer = load_tokenizer(gemma3_directory)
    tokenizer.chat_template = ONE_A_TURN.replace("PLACEHOLDER", START)
    content = [{"type": "image", "path": "pictures/0.png"}, {"type": "text", "text": "what?"}]
    turns = [
        {"role": "user", "content": content},
        said("<think>a</think>a cat"),
        {"role": "user", "content": "and?"},
        said("a dog"),
    ]
    store = make([{"messages": turns}], tokenizer=tokenizer)
    assert len(store) == 2
    first, second = store
    assert first.media == second.media
    shared = int(store.shared[0])
    assert first.media[0].stop < shared < len(first)
    assert first.input_ids[:shared].tolist() == second.input_ids[:shared].tolist()


def test_exports(make, data):
    """Rows of token ids hold no images: an export says so, and one of samples without them is made."""
    store = make()
    for export in (lambda: store.to_jsonl(data / "a.jsonl"), lambda: store.to_parquet(data / "a.parquet"), store.to_dataset):
        with pytest.raises(StoreError, match="samples with images, which rows of token ids do not hold"):
            export()
    store.select([0, 2]).to_jsonl(data / "a.jsonl")
    assert len(TokenStore.from_jsonl(data / "a.jsonl", data / "texts")) == 2


@pytest.mark.parametrize("behind", [-2, 0, 1, 5, 8, 9, 10])
def test_cut_to_length(make, behind):
    """Under `truncate` no image is cut: a sample ends before one that would be."""
    long = [{"role": "user", "content": "a"}, said("b"), *row("?", "c", "pictures/0.png")["messages"]]
    whole = make([{"messages": long}], "whole")
    (image,) = whole[0].media
    limit = image.start + behind
    store = make([{"messages": long}], max_seq_len=limit, on_overflow="truncate")
    cut = image.start if image.start < limit < image.stop else limit
    assert image.stop - image.start == 9
    assert store[0].input_ids.tolist() == whole[0].input_ids[:cut].tolist()
    kept = (image,) if image.stop <= cut else ()
    assert store[0].media == kept
    assert store.accounting.tokens_lost == {"truncated": len(whole[0]) - cut}


def test_split_to_length(make):
    """Under `split` a long row with images is refused; others are split."""
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: \d+ tokens, `max_seq_len` is 24, and a row with images cannot be split"
    ):
        make(max_seq_len=24, on_overflow="split")
    assert not make(max_seq_len=24).has_media


def test_damage(make, data):
    """A torn or foreign array of images is a store that is damaged."""
    store = make()
    (store.path / "image_files.bin").write_bytes(b"")
    with pytest.raises(StoreError, match="image_files.bin is torn"):
        TokenStore.open(store.path)


IMAGES = st.builds(
    Media,
    st.text(max_size=8),
    st.text(st.characters() | st.sampled_from("\ud800\udcff\n")),
    st.none() | st.binary(max_size=9) | st.just(b"\n[]"),
    st.from_regex("[0-9a-f]{64}", fullmatch=True),
    st.integers(0, 9),
    st.integers(10, 19),
).map(lambda image: image if image.data is None else attrs.evolve(image, path=None))


@given(st.lists(st.lists(IMAGES, max_size=3).map(tuple), min_size=1, max_size=4))
def test_what_is_kept(samples):
    """Images come back as they were, whatever their paths, fields and bytes."""
    arrays = arrays_of_media(samples)
    for name in (MEDIA_OFFSETS, MEDIA_FILE_OFFSETS):
        arrays[name] = np.append(0, np.cumsum(arrays[name]))
    assert [media_at(arrays, at) for at in range(len(samples))] == samples
