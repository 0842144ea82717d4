"""The arguments of a forward are those of the model's own processor, key by key and bit by bit."""

import threading
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from forge_data import DataError, MediaInputs, TokenizerError, load_tokenizer
from forge_data.media._load import load_processor, processor_files
from forge_data.tokenizing._encoder import Encoder

from .. import pictured

pytestmark = pytest.mark.together

TURNS = [
    (("user", [0, "what is it?"]), ("assistant", "a cat")),
    (("user", [0, "and", 1, "what?", 2]), ("assistant", "two"), ("user", ["look", 3]), ("assistant", "a dog")),
    (("system", "be kind"), ("user", [4]), ("assistant", "hello")),
]


def encoded(directory, *turns):
    tokenizer = load_tokenizer(directory)
    (made,) = Encoder(tokenizer).encode([pictured.chat(*turns)])
    (example,) = made.examples
    return tokenizer, example


@pytest.mark.parametrize("turns", TURNS)
def test_as_the_processor(gemma3_directory, turns):
    """Every array but ids and attention mask is there, with its values, shape and dtype, and no other."""
    from transformers import AutoProcessor

    tokenizer, example = encoded(gemma3_directory, *turns)
    chat = pictured.chat(*turns)
    images = [pictured.pixels(part) for _, content in turns for part in content if isinstance(part, int)]
    text = tokenizer.apply_chat_template(chat.messages, tokenize=False)
    processor = AutoProcessor.from_pretrained(gemma3_directory)
    expected = processor(text=[text], images=[images], add_special_tokens=False, return_tensors="np")
    assert example.input_ids.tolist() == expected.pop("input_ids")[0].tolist()
    expected.pop("attention_mask")
    made = MediaInputs(gemma3_directory)(example)
    assert made.keys() == expected.keys() == {"pixel_values", "token_type_ids"}
    for name, values in made.items():
        assert values.dtype == expected[name].dtype
        assert np.array_equal(values, expected[name])


def test_spans(gemma3_directory):
    """Runs of the tokens that a model takes for images, apart from what stands around them."""
    _, example = encoded(gemma3_directory, *TURNS[1])
    spans = MediaInputs(gemma3_directory).spans(example.input_ids)
    assert len(spans) == len(example.media) == 4
    for (start, stop), image in zip(spans, example.media, strict=True):
        assert image.start < start < stop < image.stop
        assert stop - start == 4
    assert MediaInputs(gemma3_directory).spans(example.input_ids[:1]) == []


def test_a_text(gemma3_directory):
    """A row without images gets what the processor makes of a text: kinds of tokens, all 0."""
    from transformers import AutoProcessor

    _, example = encoded(gemma3_directory, ("user", "what?"), ("assistant", "a cat"))
    processor = AutoProcessor.from_pretrained(gemma3_directory)
    (made,) = MediaInputs(processor)(example).items()
    assert made[0] == "token_type_ids"
    assert made[1].tolist() == [[0] * len(example)]
    assert "token_type_ids" in processor(text=["what?"], return_tensors="np")


def test_a_file_that_changed(gemma3_directory, tmp_path):
    """A changed or missing file is one error, with the row's place, the field and the file."""
    _, example = encoded(gemma3_directory, *TURNS[0])
    path = tmp_path / "cat.png"
    path.write_bytes(pictured.png(0))
    moved = attrs.evolve(example, media=(attrs.evolve(example.media[0], data=None, path=str(path)),))
    inputs = MediaInputs(gemma3_directory)
    inputs(moved)
    path.write_bytes(pictured.png(1))
    with pytest.raises(DataError, match=r"^rows.jsonl:3: field messages\[0\].content\[0\]: .*cat.png changed since"):
        inputs(moved, "rows.jsonl:3")
    path.unlink()
    with pytest.raises(DataError, match=r"cat.png cannot be read: No such file"):
        inputs(moved, "rows.jsonl:3")


def test_a_processor_of_other_settings(gemma3_directory):
    """A processor that makes more tokens of an image than the row has is told apart before a model is."""
    from transformers import AutoProcessor

    _, example = encoded(gemma3_directory, *TURNS[1])
    processor = AutoProcessor.from_pretrained(gemma3_directory)
    processor.full_image_sequence = processor.full_image_sequence.replace("<end", "<image_soft_token><end")
    with pytest.raises(
        DataError, match=r"^rows.jsonl:2: .* makes 20 tokens of the row's media, which were prepared as 16; prepare"
    ):
        MediaInputs(processor)(example, "rows.jsonl:2")


def test_several_threads(gemma3_directory):
    """Threads that share one get what each would get alone."""
    inputs = MediaInputs(gemma3_directory)
    examples = [encoded(gemma3_directory, ("user", [seed, "what?"]), ("assistant", "a cat"))[1] for seed in range(4)]
    expected = [inputs(example)["pixel_values"] for example in examples]
    found = [[] for _ in examples]

    def work(at):
        for _ in range(5):
            found[at].append(inputs(examples[at])["pixel_values"])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for alone, several in zip(expected, found, strict=True):
        assert len(several) == 5
        assert all(np.array_equal(alone, each) for each in several)


def test_no_processor(gemma3_directory, tmp_path):
    """A directory without processor, and a tokenizer from nowhere, are told apart."""
    load_tokenizer(gemma3_directory).save_pretrained(tmp_path / "text")
    with pytest.raises(
        TokenizerError, match=r"no processor of them can be loaded from '.*text': .*; use a model that takes them"
    ):
        MediaInputs(tmp_path / "text")
    with pytest.raises(TokenizerError, match=r"the tokenizer was not loaded from a directory"):
        load_processor("")
    with pytest.raises(TokenizerError, match=r"what reads for the model \(TokenizersBackend\) does not take them beside text"):
        MediaInputs(load_tokenizer(gemma3_directory))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ImportError("\nQwen3VLVideoProcessor requires the Torchvision library but it was not found. Check out"),
            "install the torchvision",
        ),
        (ValueError("None could be imported. Missing optional dependencies: torchvision. Please"), "install the torchvision"),
        (RuntimeError("operator torchvision::nms does not exist"), "torchvision::nms does not exist; install the torchvision"),
        (
            ImportError(
                "\nX requires the PIL library but it was not found. You can install it with pip: `pip install pillow`."
            ),
            "install Pillow",
        ),
        # Either will do for Gemma 3, and Pillow alone is wanted by all.
        (
            ValueError("Missing optional dependencies: torchvision, Pillow. Please"),
            r"forge-data\[images\]",
        ),
        (ImportError("Package `num2words` is required. Install it"), "Package `num2words` is required; install it"),
    ],
)
def test_a_missing_package(gemma3_directory, monkeypatch, error, expected):
    """A processor that needs a package that is not there, or not of this torch, names it."""
    from transformers import AutoProcessor

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(AutoProcessor, "from_pretrained", refuse)
    with pytest.raises(TokenizerError, match=r"needs a package that cannot be imported: .*" + expected):
        MediaInputs(gemma3_directory)


def test_marks_around_an_image(gemma3_directory, monkeypatch):
    """A processor that refuses placeholders without the marks of an image (HunYuan-VL) is given them."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(gemma3_directory)
    processor.image_start_token, processor.image_end_token = "<start_of_turn>", "<end_of_turn>"
    call = type(processor).__call__

    def other(self, **given):
        if "<start_of_image><start_of_image>" in given["text"][0]:
            raise ValueError("images without marks")
        return call(self, **given)

    _, example = encoded(gemma3_directory, *TURNS[1])
    expected = MediaInputs(gemma3_directory)(example)
    monkeypatch.setattr(type(processor), "__call__", other)
    inputs = MediaInputs(processor)
    assert inputs.joins
    found = inputs(example)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_kinds_of_tokens_for_experts(gemma3_directory, monkeypatch):
    """What a processor makes of each token for a model's experts (Ernie 4.5) is made again from ids."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(gemma3_directory)
    call, kind = type(processor).__call__, type(processor)

    def of_experts(self, ids):
        return [[number % 2 for number in each] for each in ids]

    def other(self, **given):
        made = call(self, **given)
        made["moe_mm_token_type_ids"] = np.array(of_experts(self, np.asarray(made["input_ids"]).tolist()))
        return made

    monkeypatch.setattr(kind, "create_moe_mm_token_type_ids", of_experts, raising=False)
    monkeypatch.setattr(kind, "__call__", other)
    _, example = encoded(gemma3_directory, *TURNS[1])
    found = MediaInputs(processor)(example)
    assert found["moe_mm_token_type_ids"].tolist() == [(example.input_ids % 2).tolist()]
    assert found["token_type_ids"].sum() == 16


def test_a_legacy_processor(gemma3_directory):
    """A processor that does not say what it writes for an image is refused by its class."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(gemma3_directory)
    processor.image_token = None
    with pytest.raises(TokenizerError, match=r"the processor Gemma3Processor does not say what it writes in place of an image"):
        MediaInputs(processor)


def test_files_of_a_processor(gemma3_directory, tmp_path):
    """Other settings are other hashes; a directory without has none."""
    assert [*processor_files(gemma3_directory)] == ["processor_config.json"]
    assert processor_files(tmp_path) == processor_files("") == processor_files("no/such-model") == {}
    (tmp_path / "processor_config.json").write_text("{}")
    assert processor_files(tmp_path) != processor_files(gemma3_directory)


def llava_next():
    """Cuts an image into pieces, as many as its shape needs."""
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    tokenizer = pictured.tiny_tokenizer("<image>", ["<image>"], image_token="<image>")
    cut = [[28, 56], [56, 28], [56, 56]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=cut
    )
    how = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextProcessor(image_processor=images, tokenizer=tokenizer, **how)


def idefics3():
    """Pads the pieces of a text's images to those of the text with the most."""
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    named = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    pieces = [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)]
    tokenizer = pictured.tiny_tokenizer("<image>", [*named, *pieces])
    images = Idefics3ImageProcessorPil(size={"longest_edge": 28}, max_image_size={"longest_edge": 14})
    return Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=1)


@pytest.mark.parametrize("make", [llava_next, idefics3])
def test_arrays_of_texts_that_share_a_forward(make):
    """They are padded as the processor pads those of a batch, along the dimensions in which they differ."""
    pytest.importorskip("torch")
    processor = make()
    inputs = MediaInputs(processor)
    assert inputs.joins
    assert inputs.pads
    texts = [[(30, 20)], [(15, 60), (14, 14)], [(60, 60)]]
    images = [[pictured.pixels(at, *size) for at, size in enumerate(text)] for text in texts]
    how = {"add_special_tokens": False, "padding": True, "return_tensors": "np"}
    given = {"text": [processor.image_token * len(text) for text in texts], "images": images}
    alone = [processor(text=[text], images=[own], **how) for text, own in zip(*given.values(), strict=True)]
    expected = processor(**given, **how)
    for each in (*alone, expected):
        for name in ("input_ids", "attention_mask"):
            del each[name]
    shapes = {each["pixel_values"].shape[1:] for each in alone}
    assert len(shapes) > 1
    found = inputs.join([*alone, {}])
    assert found.pop() == {}
    for name, values in expected.items():
        assert np.array_equal(np.concatenate([each[name] for each in found]), values)
    beyond = inputs.join(alone, more=True)
    sizes = expected["pixel_values"].shape
    assert {at for at in range(1, len(sizes)) if beyond[0]["pixel_values"].shape[at] > sizes[at]} == {1}
    assert len({each["pixel_values"].shape[1:] for each in beyond}) == 1


def test_arrays_that_need_no_padding(gemma3_directory):
    """They join as they are, and are the same ones."""
    inputs, arrays = MediaInputs(gemma3_directory), {"pixel_values": np.zeros((1, 3, 14, 14))}
    assert inputs.joins
    assert not inputs.pads
    assert inputs.join([arrays], more=True)[0]["pixel_values"] is arrays["pixel_values"]


def test_arrays_that_are_joined_along_another_dimension(monkeypatch):
    """Where a processor puts the pixels of all images into one strip (MiniCPM-V), the first example has them."""
    pytest.importorskip("torch")
    processor = llava_next()
    call = type(processor).__call__

    def strips(self, **given):
        made = call(self, **given)
        pieces = [piece for image in made["pixel_values"] for piece in image if piece.any()]
        made["pixel_values"] = np.concatenate(pieces, axis=-1)[None]
        return made

    monkeypatch.setattr(type(processor), "__call__", strips)
    inputs, image = MediaInputs(processor), pictured.pixels
    given = {"text": ["<image>", "<image>"], "images": [[image(0, 15, 60)], [image(1)]]}
    how = {"add_special_tokens": False, "padding": True, "return_tensors": "np"}
    alone = [dict(processor(text=[text], images=[own], **how)) for text, own in zip(*given.values(), strict=True)]
    expected = processor(**given, **how)
    assert inputs.joins
    first, second = inputs.join(alone)
    assert np.array_equal(first["pixel_values"], expected["pixel_values"])
    assert "pixel_values" not in second
    assert np.array_equal(np.concatenate([first["image_sizes"], second["image_sizes"]]), expected["image_sizes"])


@pytest.mark.parametrize("how", ["padded in front", "refused"])
def test_arrays_that_do_not_join(how, monkeypatch):
    """A processor that pads in a way of its own, or takes no texts with unlike images, is told apart."""
    pytest.importorskip("torch")
    processor = llava_next()
    call = type(processor).__call__

    def other(self, **given):
        made = call(self, **given)
        if len(given["text"]) > 1:
            if how == "refused":
                raise ValueError("unlike images")
            made["pixel_values"] = made["pixel_values"][:, ::-1]
        return made

    monkeypatch.setattr(type(processor), "__call__", other)
    inputs = MediaInputs(processor)
    assert not inputs.joins
    assert not inputs.pads


def test_a_placeholder_that_is_no_token(gemma3_directory):
    """SmolVLM's of a video: images are written in its place, whose tokens are known."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(gemma3_directory)
    known = MediaInputs(processor).token_ids
    processor.video_processor, processor.video_token = SimpleNamespace(), "<no token>"
    assert MediaInputs(processor).token_ids == known
