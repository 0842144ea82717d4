"""A tiny Gemma 3 with its own processor, rows with images, and what plain transformers makes of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor

from . import modalities
from .conftest import conversations, write_rows

if TYPE_CHECKING:
    import forge_data

TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<boi>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def save(directory: Path) -> Path:
    """A tiny Gemma 3 with fixed random weights in bfloat16: 4 tokens for an image, between marks and blank lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["<pad>", "<start>", "<end>", "<boi>", "<eoi>", "<img>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([message["content"] for row in conversations() for message in row["messages"]], trainer)
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>", **named)
    tokenizer.chat_template = TEMPLATE
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(image_processor=images, tokenizer=tokenizer, chat_template=TEMPLATE, image_seq_length=4)
    config: Any = modalities.CONFIGS["gemma3"]()
    config.boi_token_index, config.eoi_token_index, config.image_token_id = tokenizer.convert_tokens_to_ids([*named.values()])
    torch.manual_seed(20)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
            parameter.data = parameter.to(torch.bfloat16)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def picture(seed: int) -> Image.Image:
    """An image of noise, of a size that its seed draws."""
    draw = np.random.default_rng(seed)
    height, width = draw.integers(20, 60, 2).tolist()
    return Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8))


def conversation(folder: Path, number: int, images: int) -> dict[str, Any]:
    """A conversation of one or two turns, with images of its own before, in and behind the user's texts."""
    (folder / "images").mkdir(exist_ok=True)
    (row,) = conversations(number + 1)[number:]
    asked = [message for message in row["messages"] if message["role"] == "user"]
    for image in range(images):
        file = f"images/{number}_{image}.png"
        picture(10 * number + image).save(folder / file)
        message: dict[str, Any] = asked[image % len(asked)]
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        message["content"].insert((number + image) % 2, {"type": "image", "image": file})
    return row


def rows(folder: Path, number: int = 24, name: str = "rows.jsonl", first: int = 0) -> Path:
    """Conversations with one image, with two, and with none, in turn."""
    numbers = range(first, first + number)
    return write_rows(folder / name, [conversation(folder, each, (each + 1) % 3) for each in numbers])


def pair(folder: Path, number: int, images: int) -> dict[str, Any]:
    """A preference whose prompt has images."""
    row = conversation(folder, number, images)
    at = next(at for at, message in enumerate(row["messages"]) if message["role"] == "assistant")
    chosen = row["messages"][at]
    rejected = {"role": "assistant", "content": "it is " + "not " * (number % 4) + "there."}
    return {"prompt": row["messages"][:at], "chosen": [chosen], "rejected": [rejected]}


def pairs(folder: Path, number: int = 24, images: int = 3) -> Path:
    """Preferences with one image, with two, and with none, in turn; with `images` 2 half have none."""
    return write_rows(folder / "pairs.jsonl", [pair(folder, each, (each + 1) % images) for each in range(number)])


@cache
def _processor(directory: Path) -> Any:
    return AutoProcessor.from_pretrained(directory)


def inputs_of(model: Path, data: Path) -> Any:
    """What the model's processor makes of each row, `three_steps.Inputs`; ids and learned tokens must be those of the store."""
    processor = _processor(model)
    given = [json.loads(line) for line in data.read_text().splitlines()]

    def inputs(store: forge_data.TokenStore, at: int) -> dict[str, torch.Tensor]:
        name, _, number = store.source(at).rpartition(":")
        assert Path(name).name == data.name
        messages = given[int(number) - 1]["messages"]
        for message in messages:
            # What the template of a processor is given for a text too.
            parts = message["content"] if isinstance(message["content"], list) else []
            for part in parts:
                if part["type"] == "image" and not Path(part["image"]).is_absolute():
                    part["image"] = str(data.parent / part["image"])
        made = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        ids, sample = made.pop("input_ids")[0], store[at]
        assert ids.tolist() == sample.input_ids.tolist()
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        learned = sample.input_ids[sample.labels != -100]
        assert processor.tokenizer.decode(learned) == "".join(f"{answer}<end>" for answer in answers)
        del made["attention_mask"]
        return dict(made)

    return inputs
