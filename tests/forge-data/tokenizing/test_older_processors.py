"""Processors that do not say what they write for an image: it is found in the text that they have tokenized."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_data import DataError, MediaInputs, TokenizerError
from forge_data.tokenizing._encoder import Encoder

from .. import pictured

pytestmark = pytest.mark.together

pytest.importorskip("torch")


def idefics2(directory):
    """3 tokens for each of five pieces of an image, with marks between, which neighbours share; a blank before a word."""
    from transformers import Idefics2Processor
    from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

    tokenizer = pictured.tiny_tokenizer("<image>", ["<fake_token_around_image>", "<image>", "<end_of_utterance>"])
    images = Idefics2ImageProcessorPil(size={"shortest_edge": 14, "longest_edge": 28}, do_image_splitting=True)
    Idefics2Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=3).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def mllama(directory):
    """One token for an image, and attention to it from there on."""
    from transformers import MllamaProcessor
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    tokenizer = pictured.tiny_tokenizer("<|image|>", ["<|image|>"])
    images = MllamaImageProcessorPil(size={"height": 14, "width": 14}, max_image_tiles=4)
    MllamaProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


MADE = {"idefics2": idefics2, "mllama": mllama}
TOKENS = {"idefics2": 15, "mllama": 1}
"""Tokens that stand for an image, without marks."""


@pytest.fixture(scope="module", params=[*MADE])
def older(request, tmp_path_factory):
    from transformers import AutoProcessor

    directory = MADE[request.param](tmp_path_factory.mktemp(request.param))
    processor = AutoProcessor.from_pretrained(directory)
    return request.param, Encoder(processor.tokenizer), processor, MediaInputs(directory)


TEXT = st.text(st.sampled_from("ab \n\tü\U0001f600.<"), max_size=6) | st.sampled_from(["<end>", "what?\n\n", " a"])
PARTS = st.lists(st.integers(0, 9) | TEXT, min_size=1, max_size=5)


@given(turns=st.lists(st.tuples(PARTS, TEXT.map(str.strip).filter(bool)), min_size=1, max_size=2))
@settings(deadline=None, max_examples=30)
def test_ids_and_arrays_are_those_of_the_processor(older, turns):
    """Rows that are kept have its ids and its arrays, and learn answers alone; images side by side are told apart."""
    name, encoder, processor, inputs = older
    sample = pictured.chat(*[turn for asked, answer in turns for turn in (("user", asked), ("assistant", answer))])
    (made,) = encoder.encode([sample])
    (example,) = made.examples
    text = processor.tokenizer.apply_chat_template(sample.messages, tokenize=False)
    images = [pictured.pixels(part) for asked, _ in turns for part in asked if isinstance(part, int)]
    of_media = {"images": [images]} if images else {}
    expected = dict(processor(text=[text], **of_media, add_special_tokens=False, return_tensors="np"))
    ids = expected.pop("input_ids")[0]
    del expected["attention_mask"]
    assert example.input_ids.tolist() == ids.tolist()
    learned = example.input_ids[example.labels != -100]
    assert processor.tokenizer.decode(learned) == "".join(f"{answer}<end>" for _, answer in turns)
    token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    assert [int((ids[at.start : at.stop] == token).sum()) for at in example.media] == [TOKENS[name]] * len(images)
    found = inputs(example)
    assert found.keys() == (expected.keys() if images else set())
    for key, values in found.items():
        assert np.array_equal(values, expected[key]), key


def test_a_prompt(older):
    """What a model is asked has the processor's arrays too."""
    _, _, processor, inputs = older
    text = f"<bos>hello {processor.image_token}what is it?"
    expected = dict(processor(text=[text], images=[[pictured.pixels(3)]], add_special_tokens=False, return_tensors="np"))
    found = inputs.prompt(text, pictured.chat(("user", [3])).media)
    assert found.keys() == expected.keys() - {"attention_mask"}
    for key, values in found.items():
        assert np.array_equal(values, expected[key]), key


def test_rows_that_share_a_forward(older):
    """Pixels are padded to the largest of a batch; arrays by which tokens attend to images have each row alone."""
    name, *_, inputs = older
    assert (inputs.joins, inputs.pads) == ((True, True) if name == "idefics2" else (False, False))


def test_more_that_is_written(tmp_path):
    """A processor that writes BOS where the template has none is refused, with what to do."""
    from transformers import AutoProcessor

    tokenizer = AutoProcessor.from_pretrained(mllama(tmp_path)).tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
    sample = pictured.chat(("user", [0, "what?"]), ("assistant", "a cat"))
    with pytest.raises((DataError, TokenizerError), match=r"MllamaProcessor .* changes more of the row's text .*such as BOS"):
        Encoder(tokenizer).encode([sample])
