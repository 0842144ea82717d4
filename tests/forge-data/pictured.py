"""Tiny processors of multimodal models, pictures, and rows with them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from forge_data._media import Media
from forge_data.formats._samples import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
TEXTS = ["hello world what is in the picture? a cat and a dog user assistant system", "user\n\n\nmodel\n\n\n\n?"]
TEMPLATE = """{{ bos_token }}{% for m in messages %}<start>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}PLACEHOLDER{% else %}\
{{ c.text }}{% endif %}{% endfor %}{% endif %}<end>
{% endfor %}{% if add_generation_prompt %}<start>assistant
{% endif %}"""
"""Of a made-up model, in which each turn is written the same at any time."""
ONE_A_TURN = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
"""Drops the reasoning of all turns but the last, so that each is a sample of its own."""


def tiny_tokenizer(placeholder: str, special: list[str], **named: str) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer of 300 tokens and the special ones, with a template that writes images."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["<pad>", "<bos>", "<end>", "<start>", *special]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=marks))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<end>", pad_token="<pad>", extra_special_tokens=special, **named
    )
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    return tokenizer


def gemma3(directory: Path) -> Path:
    """Save a processor of Gemma 3, with its own template, which needs no torchvision: 4 tokens for an image, between others."""
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    special = [*named.values(), "<start_of_turn>", "<end_of_turn>"]
    tokenizer = tiny_tokenizer("", special, **named)
    tokenizer.chat_template = (TEMPLATES / "gemma-3.jinja").read_text("utf-8")
    images = Gemma3ImageProcessorPil(size={"height": 14, "width": 14})
    processor = Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=4)
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def pixels(seed: int = 0, height: int = 20, width: int = 30) -> Any:
    """Make a picture of noise; without Pillow, as in the package's own environment, its test is skipped."""
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return pytest.importorskip("PIL.Image").fromarray(values)


def png(seed: int = 0, height: int = 20, width: int = 30) -> bytes:
    """Encode a picture of noise."""
    file = io.BytesIO()
    pixels(seed, height, width).save(file, "PNG")
    return file.getvalue()


def chat(*turns: tuple[str, str | list[str | int]], **fields: Any) -> Chat:
    """Make a conversation; numbers in a content are images, by their seeds."""
    messages, images = [], []
    for at, (role, content) in enumerate(turns):
        if not any(isinstance(part, int) for part in content):
            messages.append({"role": role, "content": "".join(map(str, content))})
            continue
        parts: list[dict[str, str]] = []
        for place, part in enumerate(content):
            if isinstance(part, int):
                images.append(Media(f"messages[{at}].content[{place}]", data=png(part)))
                parts.append({"type": "image"})
            else:
                parts.append({"type": "text", "text": part})
        messages.append({"role": role, "content": parts})
    return Chat("rows.jsonl:1", messages, media=tuple(images), **fields)
