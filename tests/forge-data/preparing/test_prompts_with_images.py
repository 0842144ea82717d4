"""Prompts with images: their ids are the processor's own, and rewards get the images that the rows have."""

import base64
import io
import json

import pytest
from transformers import AutoProcessor

from forge_data import DataError, MediaInputs, PromptStore, TokenizerError, check_first_row, prepare_prompts, show, stats

from ..pictured import pixels, png

pytestmark = pytest.mark.together

TEXT = {"type": "text", "text": "what is in the picture?"}
SYSTEM = {"role": "system", "content": "hello world"}


@pytest.fixture(scope="module")
def model(gemma3_directory):
    return str(gemma3_directory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows with images in parts, in a column for `<image>` and for parts, and without any."""
    made = tmp_path_factory.mktemp("rows")
    parts = [{"type": "image", "image": "0.png"}, TEXT]
    rows = [
        {"prompt": [SYSTEM, {"role": "user", "content": parts}], "answer": "a"},
        {"prompt": [{"role": "user", "content": "<image>and <image>?"}], "images": ["0.png", "1.png"], "answer": "b"},
        {"messages": [{"role": "user", "content": [TEXT, {"type": "image"}]}], "image": str(made / "1.png"), "answer": "c"},
        {"prompt": [{"role": "user", "content": "hello"}], "images": [], "answer": "d"},
    ]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for seed in range(2):
        (made / f"{seed}.png").write_bytes(png(seed, height=20 + 9 * seed))
    return made


@pytest.fixture(scope="module")
def store(folder, model, tmp_path_factory):
    return prepare_prompts(folder / "rows.jsonl", model, tmp_path_factory.mktemp("store"), media=True)


def with_pictures(prompt, folder):
    """Messages as a processor's template takes them, with decoded images."""
    from PIL import Image

    messages = json.loads(json.dumps(prompt))
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = Image.open(part["image"])
    return messages


def test_ids_and_arrays_are_the_processors(store, folder, model):
    """Of the messages with their generation prompt; so are the arguments of a forward."""
    processor, inputs = AutoProcessor.from_pretrained(model), MediaInputs(model)
    for prompt in store:
        made = processor.apply_chat_template(
            with_pictures(prompt.prompt, folder),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="np",
        )
        assert prompt.input_ids.tolist() == made["input_ids"][0].tolist()
        found = inputs(prompt)
        assert found.keys() == made.keys() - {"input_ids", "attention_mask"}
        assert all((found[name] == made[name]).all() for name in found)
    assert inputs.token_ids == set(processor.image_token_ids) == {processor.tokenizer.image_token_id}


def png_of(uri):
    """Return the file that a server reads of a `data:` URI."""
    kind, _, data = uri.partition(",")
    assert kind == "data:image/png;base64"
    return io.BytesIO(base64.b64decode(data))


def test_what_a_server_is_given(store, model):
    """The processor makes the prompt's ids and arrays of the placeholders and the PNGs, which lose no pixel."""
    from PIL import Image

    processor, inputs = AutoProcessor.from_pretrained(model), MediaInputs(model)
    for prompt in [each for each in store if each.media]:
        sent = inputs.unexpanded(prompt)
        assert sent.expanded == len(prompt.input_ids) > len(sent.input_ids)
        text = processor.tokenizer.decode(sent.input_ids)
        assert text == prompt.text
        assert text.count(processor.boi_token) == len(prompt.media)
        decoded = [Image.open(png_of(uri)) for uri in sent.media]
        made = processor(text=[text], images=[decoded], add_special_tokens=False, return_tensors="np")
        assert made["input_ids"][0].tolist() == prompt.input_ids.tolist()
        assert (made["pixel_values"] == inputs(prompt)["pixel_values"]).all()
    with pytest.raises(DataError, match=r"^rows\.jsonl:4: the store has no text of a prompt with media; prepare"):
        inputs.unexpanded(store[3], store.source(3))


def test_a_server_is_given_images_upright_and_in_colours(model, tmp_path):
    """What a processor is given here, whatever else a file says: turned, of one frame, without transparency and profile."""
    from PIL import Image

    picture, turned = pixels(0), Image.Exif()
    turned[0x0112] = 6
    picture.putalpha(9)
    picture.save(tmp_path / "a.png", exif=turned, icc_profile=b"none")
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "a.png")}, TEXT]}]}
    (prompt,) = prepare_prompts([row], model, tmp_path / "store", media=True)
    (sent,) = MediaInputs(model).unexpanded(prompt).media
    found = Image.open(png_of(sent))
    assert (found.mode, found.size) == ("RGB", (20, 30))
    assert found.info == {}
    assert found.tobytes() == pixels(0).transpose(Image.Transpose.ROTATE_270).tobytes()


def test_rewards_get_images_as_the_rows_have_them(store, folder):
    """By their absolute paths, in the messages and in the columns; of rows in memory their bytes."""
    zero, one = (str(folder / f"{seed}.png") for seed in range(2))
    assert [prompt.prompt[-1]["content"] for prompt in store] == [
        [{"type": "image", "image": zero}, TEXT],
        [{"type": "image", "image": zero}, {"type": "text", "text": "and "}, {"type": "image", "image": one},
         {"type": "text", "text": "?"}],
        [TEXT, {"type": "image", "image": one}],
        "hello",
    ]  # fmt: skip
    assert [prompt.columns for prompt in store] == [
        {"answer": "a"},
        {"answer": "b", "images": [zero, one]},
        {"answer": "c", "image": one},
        {"answer": "d", "images": []},
    ]


def test_plain_text(folder, model, tmp_path, capsys):
    """Images stand at marks of a text, or before it; ids are the processor's, and rewards get the row's own text and files."""
    from PIL import Image

    texts = {"what is <image>it?": "what is <start_of_image>it?", "what?": "<start_of_image>what?", "": "<start_of_image>"}
    rows = [*({"prompt": text, "images": [str(folder / "0.png")], "answer": text} for text in texts), {"prompt": "hello"}]
    store = prepare_prompts(rows, model, tmp_path / "store", media=True)
    processor = AutoProcessor.from_pretrained(model)
    for prompt, (text, written) in zip(store, texts.items(), strict=False):
        made = processor(text=[written], images=[[Image.open(folder / "0.png")]], return_tensors="np")
        assert prompt.input_ids.tolist() == made["input_ids"][0].tolist()
        assert (MediaInputs(model)(prompt)["pixel_values"] == made["pixel_values"]).all()
        assert (prompt.prompt, prompt.columns) == (text, {"images": [str(folder / "0.png")], "answer": text})
    assert store[3].media == ()
    assert PromptStore.open(tmp_path / "store")[0].media == store[0].media
    show(store)
    assert "<image 0.png, 9 tokens>" in capsys.readouterr().out
    with pytest.raises(DataError, match="prepare the rows again, as messages"):
        MediaInputs(model).unexpanded(store[0])


def test_bytes(model, tmp_path, capsys):
    """Images that a row holds are kept, and given as their bytes; they are shown by their field and size."""
    row = {"prompt": [{"role": "user", "content": [TEXT]}], "images": [{"bytes": png(0), "path": None}]}
    held = prepare_prompts([row, row | {"images": [pixels(1)]}], model, tmp_path / "held", media=True)
    assert held[0].prompt == [{"role": "user", "content": [{"type": "image", "image": png(0)}, TEXT]}]
    assert held[0].columns == {"images": [png(0)]}
    assert isinstance(held[1].columns["images"][0], bytes)
    show(held)
    shown = capsys.readouterr().out
    assert "<image images[0], 9 tokens>" in shown
    assert f'images: ["{len(png(0)):,} bytes"]' in shown


def test_opened_again(store, folder, model):
    """Not prepared anew while the images are the same; a split keeps them; counts are those of the rows."""
    before = (store.path / "store.json").stat().st_mtime_ns
    again = prepare_prompts(folder / "rows.jsonl", model, store.path, media=True)
    assert (store.path / "store.json").stat().st_mtime_ns == before
    assert again.media_counts.tolist() == [[1, 9], [2, 18], [1, 8], [0, 0]]
    assert again[2:3].media_counts.tolist() == [[1, 8]]
    assert not again[3:].has_media
    assert "4 images in 3 samples, for which 35 tokens stand" in str(stats(again))
    (one, two) = (folder / f"{seed}.png" for seed in range(2))
    data = one.read_bytes()
    try:
        one.write_bytes(two.read_bytes())
        assert not again.media_are_there()
    finally:
        one.write_bytes(data)
    assert isinstance(PromptStore.open(store.path), PromptStore)


@pytest.mark.parametrize(
    ("row", "refusal"),
    [
        (
            {"prompt": "<image>or <image>?", "images": ["0.png"]},
            "field images holds 1 image, and <image> stands in the prompt 2",
        ),
        (
            {"prompt": "<start_of_image>", "images": ["0.png"]},
            "the prompt has '<start_of_image>' in its text, which stands for",
        ),
        ({"prompt": "what?", "images": ["none.png"]}, "none.png cannot be read"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}, TEXT]}]}, "does not say which"),
        ({"prompt": [{"role": "user", "content": "?"}], "images": ["none.png"]}, "none.png cannot be read"),
        (
            {"prompt": [{"role": "user", "content": "<start_of_image>"}], "images": ["0.png"]},
            "has '<start_of_image>' in its text",
        ),
    ],
)
def test_bad_rows(row, refusal, folder, model, tmp_path):
    """One error with file, row and field."""
    (folder / "bad.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:1: {'.*' if refusal[0] != 'f' else ''}{refusal}"):
        prepare_prompts(folder / "bad.jsonl", model, tmp_path / "store", media=True)


def test_refused_without_the_argument(folder, model, tmp_path):
    """By preparing, and by the look at the first row, which reads none of the images."""
    for read in (lambda: prepare_prompts(folder / "rows.jsonl", model, tmp_path / "store"),
                 lambda: check_first_row(folder / "rows.jsonl", prompts=True)):  # fmt: skip
        with pytest.raises(DataError, match=r"rows\.jsonl:1: .* is a part of the type 'image', and only text is trained here"):
            read()
    check_first_row(folder / "rows.jsonl", prompts=True, media=True)


def test_a_model_of_text(folder, chatml_tokenizer, tmp_path):
    """A tokenizer without a processor is one error by the row."""
    with pytest.raises(TokenizerError, match=r"rows\.jsonl:1: rows have media, and the tokenizer was not loaded"):
        prepare_prompts(folder / "rows.jsonl", chatml_tokenizer, tmp_path / "store", media=True)
