"""The arguments of a forward are those of the model's own processor, key by key and bit by bit."""

import threading

import attrs
import numpy as np
import pytest

from forge_data import DataError, ImageInputs, TokenizerError, load_tokenizer
from forge_data.images._processor import load_processor, processor_files
from forge_data.tokenizing._encoder import Encoder

from .. import pictured

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
    made = ImageInputs(gemma3_directory)(example)
    assert made.keys() == expected.keys() == {"pixel_values", "token_type_ids"}
    for name, values in made.items():
        assert values.dtype == expected[name].dtype
        assert np.array_equal(values, expected[name])


def test_spans(gemma3_directory):
    """Runs of the tokens that a model takes for images, apart from what stands around them."""
    _, example = encoded(gemma3_directory, *TURNS[1])
    spans = ImageInputs(gemma3_directory).spans(example.input_ids)
    assert len(spans) == len(example.images) == 4
    for (start, stop), image in zip(spans, example.images, strict=True):
        assert image.start < start < stop < image.stop
        assert stop - start == 4
    assert ImageInputs(gemma3_directory).spans(example.input_ids[:1]) == []


def test_a_text(gemma3_directory):
    """A row without images gets what the processor makes of a text: kinds of tokens, all 0."""
    from transformers import AutoProcessor

    _, example = encoded(gemma3_directory, ("user", "what?"), ("assistant", "a cat"))
    processor = AutoProcessor.from_pretrained(gemma3_directory)
    (made,) = ImageInputs(processor)(example).items()
    assert made[0] == "token_type_ids"
    assert made[1].tolist() == [[0] * len(example)]
    assert "token_type_ids" in processor(text=["what?"], return_tensors="np")


def test_a_file_that_changed(gemma3_directory, tmp_path):
    """A changed or missing file is one error, with the row's place, the field and the file."""
    _, example = encoded(gemma3_directory, *TURNS[0])
    path = tmp_path / "cat.png"
    path.write_bytes(pictured.png(0))
    moved = attrs.evolve(example, images=(attrs.evolve(example.images[0], data=None, path=str(path)),))
    inputs = ImageInputs(gemma3_directory)
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
        DataError, match=r"^rows.jsonl:2: .* makes 20 tokens of the row's images, which were prepared as 16; prepare"
    ):
        ImageInputs(processor)(example, "rows.jsonl:2")


def test_several_threads(gemma3_directory):
    """Threads that share one get what each would get alone."""
    inputs = ImageInputs(gemma3_directory)
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
        TokenizerError, match=r"no processor of images can be loaded from '.*text': .*; use a model that takes images"
    ):
        ImageInputs(tmp_path / "text")
    with pytest.raises(TokenizerError, match=r"the tokenizer was not loaded from a directory"):
        load_processor("")
    with pytest.raises(TokenizerError, match=r"no processor of text and images, but"):
        ImageInputs(load_tokenizer(gemma3_directory))


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
            "install pillow",
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
        ImageInputs(gemma3_directory)


def test_a_legacy_processor(gemma3_directory):
    """A processor that does not say what it writes for an image is refused by its class."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(gemma3_directory)
    processor.image_token = None
    with pytest.raises(TokenizerError, match=r"the processor Gemma3Processor does not say what it writes in place of an image"):
        ImageInputs(processor)


def test_files_of_a_processor(gemma3_directory, tmp_path):
    """Other settings are other hashes; a directory without has none."""
    assert [*processor_files(gemma3_directory)] == ["processor_config.json"]
    assert processor_files(tmp_path) == processor_files("") == processor_files("no/such-model") == {}
    (tmp_path / "processor_config.json").write_text("{}")
    assert processor_files(tmp_path) != processor_files(gemma3_directory)


def test_images_that_are_cut_into_unlike_numbers():
    """A processor whose arrays of two texts do not join is found, though two shapes of images may be cut alike."""
    pytest.importorskip("torch")
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    tokenizer = pictured.tiny_tokenizer("<image>", ["<image>"], image_token="<image>")
    cut = [[28, 56], [56, 28], [56, 56]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=cut
    )
    how = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    assert not ImageInputs(LlavaNextProcessor(image_processor=images, tokenizer=tokenizer, **how)).joins
