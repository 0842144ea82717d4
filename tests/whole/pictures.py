"""A tiny Gemma 3 with its processor, which needs no torchvision, and pictures for it."""

from __future__ import annotations

from pathlib import Path

from .modalities import CONFIGS

_MARKS = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<boi>{% else %}\
{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_gemma3(directory: Path) -> Path:
    """A plain Hugging Face directory: four tokens stand for an image, between two others."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForMultimodalLM, Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_MARKS.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=marks, initial_alphabet=alphabet, vocab_size=300, show_progress=False)
    made.train_from_iterator(["what is in the picture? a cat"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=marks[3:], **_MARKS
    )
    tokenizer.chat_template = _TEMPLATE
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=4).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    config = CONFIGS["gemma3"]()
    ids = dict(zip(_MARKS, tokenizer.convert_tokens_to_ids([*_MARKS.values()]), strict=True))
    config.boi_token_index, config.eoi_token_index, config.image_token_id = ids.values()
    torch.manual_seed(20)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Or answers would be those of the last token alone, whatever the images are.
            parameter += (9 if "post_attention" in name else 0.3) * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def write_picture(file: Path, seed: int = 0) -> Path:
    """A PNG file of noise, dark (seed 0) or bright (1)."""
    import numpy as np
    from PIL import Image

    Image.fromarray(np.random.default_rng(seed).integers(200 * seed, 200 * seed + 50, (40, 60, 3), dtype=np.uint8)).save(file)
    return file
