"""Plain text with images: ids are those of the model's processor for prompt and completion, and the completion is learned."""

import attrs
import numpy as np
import pytest

from forge_data import DataError, MediaInputs, TokenizerError, load_tokenizer
from forge_data._media import Media
from forge_data.formats._samples import Text
from forge_data.tokenizing._encoder import Encoder

from .. import pictured

pytestmark = pytest.mark.together
pytest.importorskip("PIL")


def text(prompt, completion, *places):
    media = tuple(Media(f"images[{at}]", data=pictured.png(at)) for at in range(len(places)))
    return Text("rows.jsonl:1", prompt, completion, media=media, places=places)


@pytest.fixture(scope="module")
def paligemma_directory(tmp_path_factory):
    """A processor of PaliGemma, which needs no torchvision: 4 tokens for an image."""
    from transformers import PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    directory = tmp_path_factory.mktemp("paligemma")
    tokenizer = pictured.tiny_tokenizer("", [])
    tokenizer.chat_template = None
    images = SiglipImageProcessorPil(size={"height": 14, "width": 14}, image_seq_length=4)
    PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(directory)
    return directory


def processor_of(directory):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(directory)


ASKED = {(0,): "<image>what is it", (0, 0): "<image><image>what is it", (3, 6): "wha<image>t i<image>s it"}
"""Places of images in a prompt → the processor's text of it."""


@pytest.mark.parametrize("places", ASKED)
@pytest.mark.parametrize("completion", ["a cat", "\n a dog", "<end>"])
def test_a_suffix(places, completion, paligemma_directory):
    """PaliGemma: all arrays are the processor's, labels too, and those of training are made again from the example."""
    sample = text("what is it", completion, *places)
    ((example,),) = [made.examples for made in Encoder(load_tokenizer(paligemma_directory)).encode([sample])]
    images = [pictured.pixels(at) for at in range(len(places))]
    expected = processor_of(paligemma_directory)(
        text=[ASKED[places]], images=[images], suffix=[completion], return_tensors="np"
    )
    assert example.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert example.labels.tolist() == expected["labels"][0].tolist()
    assert [medium.stop - medium.start for medium in example.media] == [4] * len(places)
    assert example.roles == ("prompt", "completion")
    made = MediaInputs(paligemma_directory)(example)
    assert made.keys() == {"pixel_values", "token_type_ids"}
    assert all(np.array_equal(array, expected[name]) for name, array in made.items())


def test_texts_beside(paligemma_directory):
    """A text without images is causal; a prompt that is asked is the processor's."""
    inputs, encoder = MediaInputs(paligemma_directory), Encoder(load_tokenizer(paligemma_directory))
    ((example,),) = [made.examples for made in encoder.encode([text("what is it", "a cat")])]
    assert inputs(example)["token_type_ids"].tolist() == [[1] * len(example)]
    assert inputs.marks == (("token_type_ids", 1),)
    made = inputs.prompt("what is it", text("", "", 0).media, places=[0])
    expected = processor_of(paligemma_directory)(text=["<image>what is it"], images=[[pictured.pixels(0)]], return_tensors="np")
    assert made.keys() == {"input_ids", "pixel_values", "token_type_ids"}
    assert all(np.array_equal(array, expected[name]) for name, array in made.items())


def test_one_text(gemma3_directory):
    """Any other processor is given prompt and completion as one text, with the tokenizer's special tokens; EOS ends it."""
    tokenizer = load_tokenizer(gemma3_directory)
    ((example,),) = [made.examples for made in Encoder(tokenizer).encode([text("what is it?", " a cat", 5)])]
    processor = processor_of(gemma3_directory)
    mark = "<start_of_image>"
    made = processor(text=[f"what {mark}is it? a cat"], images=[[pictured.pixels(0)]], return_tensors="np")
    assert example.input_ids.tolist() == [*made["input_ids"][0].tolist(), tokenizer.eos_token_id]
    assert tokenizer.decode(example.input_ids[example.labels != -100]) == " a cat<end>"
    weighed = attrs.evolve(text("what is it?", " a cat", 5), weight=0.5)
    ((other,),) = [made.examples for made in Encoder(tokenizer).encode([weighed])]
    assert {*other.weights[other.labels != -100].tolist()} == {0.5}
    asked = MediaInputs(gemma3_directory).prompt("what?", text("", "", 0).media, places=[0])
    expected = processor(text=[f"{mark}what?"], images=[[pictured.pixels(0)]], return_tensors="np")
    assert asked["input_ids"].tolist() == expected["input_ids"].tolist()


def test_what_all_tokens_learn(paligemma_directory, gemma3_directory):
    """`train_on=all` learns all but images; where a prompt sees what is ahead it is refused."""
    sample, tokenizer = text("what is it", "a cat", 0), load_tokenizer(gemma3_directory)
    ((example,),) = [made.examples for made in Encoder(tokenizer, "all").encode([sample])]
    (medium,) = example.media
    learned = [*range(medium.start), *range(medium.stop, len(example))]
    assert np.flatnonzero(example.labels != -100).tolist() == learned
    with pytest.raises(DataError, match=r"^rows.jsonl:1: `train_on` is all, and this model's prompt sees what is ahead"):
        Encoder(load_tokenizer(paligemma_directory), "all").encode([sample])


def test_a_conversation(paligemma_directory):
    """PaliGemma has no turns: which rows it takes is said."""
    tokenizer = load_tokenizer(paligemma_directory)
    tokenizer.chat_template = pictured.TEMPLATE.replace("PLACEHOLDER", "<image>")
    sample = pictured.chat(("user", [0, "what is it"]), ("assistant", "a cat"))
    with pytest.raises(TokenizerError, match=r"^rows.jsonl:1: the processor PaliGemmaProcessor is given prompt and completion"):
        Encoder(tokenizer).encode([sample])


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        (
            "a <start_of_image>",
            "b",
            r"^rows.jsonl:1: the prompt has '<start_of_image>' in its text, which stands for an image",
        ),
        ("a", "b <start_of_image>", r"^rows.jsonl:1: the completion has '<start_of_image>' in its text"),
        (
            "a",
            "b <image_soft_token>",
            r"^rows.jsonl:1: field completion has '<image_soft_token>' in it, which stands for a part",
        ),
    ],
)
def test_refused(prompt, completion, expected, gemma3_directory):
    """A token of an image in a text is named by its field."""
    with pytest.raises(DataError, match=expected):
        Encoder(load_tokenizer(gemma3_directory)).encode([text(prompt, completion, 0)])
