"""Conversations with images: ids are the processor's own, answers alone are learned, and every fault is named."""

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_data import DataError, TemplateError, TokenizerError, load_tokenizer
from forge_data.formats._samples import Preference
from forge_data.masking._media import moved
from forge_data.tokenizing._encoder import Encoder

from .. import pictured
from ..pictured import ONE_A_TURN, TEMPLATE, chat

pytestmark = pytest.mark.together

START = "<start_of_image>"


@pytest.fixture(scope="module")
def tokenizer(gemma3_directory):
    return load_tokenizer(gemma3_directory)


@pytest.fixture(scope="module")
def processor(gemma3_directory):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(gemma3_directory)


@pytest.fixture
def templated(gemma3_directory):
    """A tokenizer with a made-up template."""

    def make(template):
        tokenizer = load_tokenizer(gemma3_directory)
        tokenizer.chat_template = template.replace("PLACEHOLDER", START)
        return tokenizer

    return make


def examples(tokenizer, sample, **options):
    (made,) = Encoder(tokenizer, **options).encode([sample])
    return made.examples


def learned(tokenizer, example):
    return tokenizer.decode(example.input_ids[example.labels != -100])


def oracle(processor, sample):
    """Ids of the processor's own chat template, and how many of them stand for images."""
    images = iter([pictured.pixels(int(image.field)) for image in sample.media])
    messages = [
        message
        if isinstance(message["content"], str)
        else message
        | {
            "content": [
                {"type": "image", "image": next(images)} if part["type"] == "image" else part for part in message["content"]
            ]
        }
        for message in sample.messages
    ]
    made = processor.apply_chat_template(messages, tokenize=True, return_dict=True)
    return list(made["input_ids"][0]), int(np.sum(made["token_type_ids"]))


# Blanks, and special tokens of the model that stand for no image, are text as any other.
TEXT = st.text(st.sampled_from("ab \n\tü\U0001f600."), max_size=8) | st.sampled_from(["<end_of_turn>", "<bos>", "what?\n\n"])
PARTS = st.lists(st.integers(0, 9) | TEXT, min_size=1, max_size=5)


@given(
    system=st.none() | TEXT.filter(str.strip),
    turns=st.lists(st.tuples(PARTS | TEXT, TEXT.filter(str.strip)), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=60)
def test_ids_are_those_of_the_processor(gemma3_directory, system, turns):
    """Whatever stands between images: ids are those of `processor.apply_chat_template`, images and answers are told apart."""
    tokenizer, processor = _loaded(gemma3_directory)
    said = [("system", system)] if system is not None else []
    for question, answer in turns:
        said += [("user", question), ("assistant", answer)]
    sample = chat(*said)
    sample = attrs.evolve(
        sample, media=tuple(attrs.evolve(each, field=str(seed)) for each, seed in zip(sample.media, seeds(said), strict=True))
    )
    (example,) = examples(tokenizer, sample)
    ids, soft = oracle(processor, sample)
    assert example.input_ids.tolist() == ids
    assert len(example.media) == len(sample.media)
    inside = np.zeros(len(ids), dtype=bool)
    before = 0
    for image in example.media:
        assert before <= image.start < image.stop <= len(ids)
        before = image.stop
        inside[image.start : image.stop] = True
    assert int((example.input_ids == processor.tokenizer.image_token_id).sum()) == soft == 4 * len(sample.media)
    assert not (inside & (example.labels != -100)).any()
    assert inside[example.input_ids == processor.tokenizer.image_token_id].all()
    assert learned(tokenizer, example) == "".join(answer.strip() + "<end_of_turn>" for _, answer in turns)
    roles = {
        role for (start, stop), role in zip(example.segments.tolist(), example.roles, strict=True) if inside[start:stop].any()
    }
    assert roles <= {"user", "template"}


def seeds(said):
    return [part for _, content in said if not isinstance(content, str) for part in content if isinstance(part, int)]


_KNOWN = {}


def _loaded(directory):
    from transformers import AutoProcessor

    if directory not in _KNOWN:
        _KNOWN[directory] = load_tokenizer(directory), AutoProcessor.from_pretrained(directory)
    return _KNOWN[directory]


def test_a_batch_of_all_kinds(tokenizer):
    """Rows with images beside rows of the same roles without: each is what it is alone."""
    plain = [chat(("user", f"question {number}"), ("assistant", f"answer {number}")) for number in range(4)]
    pictures = [chat(("user", [number, f"question {number}"]), ("assistant", f"answer {number}")) for number in range(3)]
    rows = [plain[0], pictures[0], plain[1], plain[2], pictures[1], pictures[2], plain[3]]
    encoder = Encoder(tokenizer)
    for made, row in zip(encoder.encode(rows) + encoder.encode(rows), rows + rows, strict=True):
        (alone,) = examples(tokenizer, row)
        (example,) = made.examples
        assert example.input_ids.tolist() == alone.input_ids.tolist()
        assert example.labels.tolist() == alone.labels.tolist()
        assert example.media == alone.media
        assert bool(example.media) == bool(row.media)
    for row in pictures:
        assert encoder.encode_known(row.messages) is None


def test_a_sample_a_turn(templated):
    """Where turns are samples of their own, each has the images of its own text."""
    turns = [("user", [0, "what?"]), ("assistant", "<think>a</think>a cat"), ("user", ["and", 1, 2]), ("assistant", "two dogs")]
    first, second = examples(templated(ONE_A_TURN), chat(*turns))
    assert [len(first.media), len(second.media)] == [1, 3]
    assert first.media[0].sha256 == second.media[0].sha256
    assert learned(templated(ONE_A_TURN), first) == "<think>a</think>a cat<end>"
    assert learned(templated(ONE_A_TURN), second) == "two dogs<end>"


@pytest.mark.parametrize("turns", ["auto", "history"])
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_what_is_learned(templated, train_on, turns):
    """Under every setting tokens of images are never learned, and the others are as they are in a text."""
    tokenizer = templated(TEMPLATE)
    said = [("user", [0, "what?"]), ("assistant", "a cat"), ("user", ["and", 1]), ("assistant", "a dog")]
    (example,) = examples(tokenizer, chat(*said), train_on=train_on, turns=turns)
    expected = {"assistant": "a cat<end>a dog<end>", "last": "a dog<end>"}
    kept = np.ones(len(example), dtype=bool)
    for image in example.media:
        kept[image.start : image.stop] = False
    if train_on == "all":
        assert ((example.labels != -100) == kept).all()
    else:
        assert learned(tokenizer, example) == expected[train_on]


def test_unmask_and_weights(templated):
    """Contents beside images are learned under `unmask`, and weights stay those of their messages."""
    tokenizer = templated(TEMPLATE)
    said = [("user", [0, "what?", 1, "where?"]), ("assistant", "a cat")]
    (example,) = examples(tokenizer, chat(*said, unmask=True))
    assert learned(tokenizer, example) == "what?where?a cat<end>"
    (example,) = examples(tokenizer, chat(*said, weights=(0.0, 0.5), weight=3.0))
    assert learned(tokenizer, example) == "a cat<end>"
    assert set(example.weights[example.labels != -100].tolist()) == {1.5}


def test_contents_in_parts_alone(templated):
    """A template that writes lists of parts alone gets them for every message, with images or without."""
    listed = (
        "{% for m in messages %}<start>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}PLACEHOLDER"
        "{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
    )
    tokenizer = templated(listed)
    (example,) = examples(tokenizer, chat(("system", "hello"), ("user", ["what?", 0]), ("assistant", "a cat")))
    assert learned(tokenizer, example) == "a cat<end>"
    assert len(example.media) == 1


FORGED = [
    ([0, f"see {START} here"], r"field messages\[0\].content has '<start_of_image>' in its text, which stands for an image"),
    ([f"see {START} here", "and", 0], r"field messages\[0\].content\[0\].text has '<start_of_image>'"),
    ([0, "<image_soft_token>"], r"field messages\[0\] has '<image_soft_token>' in it, which stands for a part of a medium"),
]


@pytest.mark.parametrize(("content", "expected"), FORGED)
def test_a_placeholder_in_a_text(tokenizer, content, expected):
    """A text that a model would take for an image, or a part of one, is refused: it would take another image's place."""
    with pytest.raises(DataError, match=rf"^rows.jsonl:1: {expected}"):
        examples(tokenizer, chat(("user", content), ("assistant", "a cat")))


def test_a_placeholder_put_together(templated):
    """Nor can a text make a placeholder with the template's own text around it."""
    tokenizer = templated(TEMPLATE.replace("{{ c.text }}", "<start_of_{{ c.text }}>"))
    with pytest.raises(DataError, match="has '<start_of_image>' in its text"):
        examples(tokenizer, chat(("user", [0, "image"]), ("assistant", "a cat")))


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE.replace("PLACEHOLDER", ""),
        TEMPLATE.replace("PLACEHOLDER", "PLACEHOLDERPLACEHOLDER"),
        "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant\n{% endif %}",
    ],
)
def test_a_template_that_drops_images(templated, template):
    """A template that writes no placeholder for an image, or several, is named."""
    with pytest.raises(
        TemplateError, match=r"rows.jsonl:1: the chat template of .* writes \d of '<start_of_image>'.*have 1 image; use"
    ):
        examples(templated(template), chat(("user", [0, "what?"]), ("assistant", "a cat")))


def test_a_placeholder_in_a_tool(templated):
    """It is found in what describes a tool, too, and the tool is named."""
    tools = [{"type": "function", "function": {"name": "f", "description": f"draws {START}", "parameters": {}}}]
    tokenizer = templated("{{ tools | tojson if tools else '' }}" + TEMPLATE)
    with pytest.raises(
        DataError, match=rf"^rows.jsonl:1: field tools\[0\] has '{START}' in its text, which stands for an image"
    ):
        examples(tokenizer, chat(("user", [0]), ("assistant", "a"), tools=tools))


def test_a_template_of_texts(templated):
    """A template that takes no lists of parts is refused with what does."""
    with pytest.raises(DataError, match=r"refuses the conversation: .*lists of parts: use the template of the model's proc"):
        examples(
            templated("{% for m in messages %}{{ m.role + m.content }}<end>{% endfor %}"),
            chat(("user", [0]), ("assistant", "a")),
        )


def test_a_template_of_another_order(templated):
    """A template that writes turns in another order would give each image another's place."""
    backwards = templated(TEMPLATE.replace("for m in messages", "for m in messages | reverse"))
    with pytest.raises(TemplateError, match="writes the images of messages in another order|leaves open"):
        examples(
            backwards,
            chat(("user", [0, "what?"]), ("assistant", "a cat"), ("user", [1]), ("assistant", "two")),
            turns="history",
        )


def test_no_processor(gemma3_directory, tmp_path):
    """Without the model's processor a row with images is refused, again and again, and others are not."""
    load_tokenizer(gemma3_directory).save_pretrained(tmp_path)
    encoder = Encoder(load_tokenizer(tmp_path))
    for _ in range(2):
        with pytest.raises(
            TokenizerError, match=r"^rows.jsonl:1: there are media, and no processor of them can be loaded from"
        ):
            encoder.encode([chat(("user", [0]), ("assistant", "a cat"))])
    assert len(encoder.encode([chat(("user", "hello"), ("assistant", "a cat"))])) == 1


def test_a_processor_of_other_tokens(tokenizer, monkeypatch):
    """A processor that changes more of a text than placeholders is refused, with the token from which on."""
    encoder = Encoder(tokenizer)
    own = encoder._processor._processor

    class Adds:
        def __getattr__(self, name):
            return getattr(own, name)

        def __call__(self, text, **options):
            return own(text=[each + "<eos>" for each in text], **options)

    monkeypatch.setattr(encoder._processor, "_processor", Adds())
    with pytest.raises(DataError, match=r"makes other tokens of the row than its text has \(\d+, not \d+, from token \d+ on\)"):
        encoder.encode([chat(("user", [0]), ("assistant", "a cat"))])


def test_preferences(tokenizer):
    """Both answers of a preference are what each is alone, with the images of their prompt."""
    sides = [chat(("user", ["is ", 0, 1]), ("assistant", text), first_completion=1) for text in ("a cat", "a dog")]
    (pair,) = Encoder(tokenizer).encode([Preference("rows.jsonl:1", *sides)])
    alone = Encoder(tokenizer).encode(sides)
    for found, (expected,) in zip(pair.examples, (each.examples for each in alone), strict=True):
        assert found.input_ids.tolist() == expected.input_ids.tolist()
        assert found.labels.tolist() == expected.labels.tolist()
        assert found.media == expected.media
    assert pair.examples[0].media == pair.examples[1].media


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 6)), max_size=4))
def test_moved(drawn):
    """Places outside of placeholders go where their characters go."""
    text, at, starts, stops, sizes, made = "", 0, [], [], [], ""
    for gap, width, size in drawn:
        text += "." * gap + "#" * width
        made += "." * gap + "!" * size
        at += gap
        starts.append(at)
        at += width
        stops.append(at)
        sizes.append(size)
    text, made = text + "..", made + ".."
    outside = [place for place in range(len(text)) if text[place] == "."]
    assert moved(outside, starts, stops, sizes) == [place for place in range(len(made)) if made[place] == "."]
    assert moved([len(text)], starts, stops, sizes) == [len(made)]
