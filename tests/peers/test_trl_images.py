"""Steps of TRL's SFTTrainer and DPOTrainer, and of forge's on rows with images: the same losses and gradient norms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is the oracle of this file")

STEPS, BATCH, RATE = 3, 4, 1e-3
TEMPLATE = """{% for m in messages %}<turn>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<boi>{% else %}\
{{ c.text }}{% endif %}{% endfor %}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<turn>assistant
{% endif %}"""
PLAIN: dict[str, Any] = {"learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": 0.5, "max_steps": STEPS}


def saved(path: Path) -> Path:
    """Save a tiny Gemma 3 with its processor."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForImageTextToText, Gemma3Config, Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["<pad>", "<end>", "<turn>", *named.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["what is it? a cat"], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=marks)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>", **named)
    tokenizer.chat_template = TEMPLATE
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=4)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = Gemma3Config(
        text_config={**shape, "vocab_size": len(tokenizer), "num_key_value_heads": 2, "query_pre_attn_scalar": 8},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<img>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<boi>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<eoi>"),
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def rows(number: int) -> list[dict[str, Any]]:
    """One or two pictures of noise a row."""
    from PIL import Image

    draw, found = np.random.default_rng(3), []
    for row in range(number):
        pictures = [Image.fromarray(draw.integers(0, 255, (20, 30, 3), dtype=np.uint8)) for _ in range(1 + row % 2)]
        parts = [{"type": "image"} for _ in pictures]
        question = {"role": "user", "content": [*parts, {"type": "text", "text": f"what is it, {row}?"}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": "a cat" * (1 + row % 3)}]}
        found.append({"prompt": [question], "completion": [answer], "images": pictures})
    return found


def pairs(number: int) -> list[dict[str, Any]]:
    """The same rows with a worse answer."""
    found = []
    for at, row in enumerate(rows(number)):
        worse = {"role": "assistant", "content": [{"type": "text", "text": "it is it " * (1 + at % 2)}]}
        found.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": [worse], "images": row["images"]})
    return found


@pytest.mark.parametrize(("verb", "every_part"), [("sft", False), ("dpo", False), ("sft", True), ("dpo", True)])
def test_three_steps(verb: str, every_part: bool, tmp_path: Path) -> None:
    """The order of forge's plan, one micro-batch a step, clipping, AdamW: loss and gradient norm to 1e-5.

    TRL trains every part of a model, as forge does where none is frozen.
    """
    import forge

    model_path, number = saved(tmp_path / "model"), STEPS * BATCH
    theirs = _trl(verb, model_path, (rows if verb == "sft" else pairs)(number), tmp_path, every_part=every_part)
    getattr(forge, verb)(
        model_path=str(model_path),
        # Made anew: TRL's collator takes the text of rows in place.
        data_path=(rows if verb == "sft" else pairs)(number),
        ckpt_output_dir=str(tmp_path / "run"),
        effective_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler="constant",
        beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=0.5,
        max_steps=STEPS,
        dtype="float32",
        freeze_vision_tower=not every_part,
        freeze_multi_modal_projector=not every_part,
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ours = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def _trl(verb: str, model_path: Path, given: Any, scratch: Path, *, every_part: bool) -> list[tuple[float, float]]:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor

    import forge_packing

    plan = forge_packing.plan([9] * len(given), batch_size=BATCH, max_tokens=9, seed=42, epochs=1)
    order = np.concatenate([plan.samples(step) for step in range(STEPS)])

    def load() -> Any:
        model = AutoModelForImageTextToText.from_pretrained(model_path, dtype="float32", attn_implementation="eager")
        model.requires_grad_(every_part)
        for part in (model.get_decoder(), model.get_output_embeddings()):
            part.requires_grad_(True)
        return model

    own: dict[str, Any] = {"completion_only_loss": True} if verb == "sft" else {"beta": 0.1}
    trainer_class, config_class = (trl.SFTTrainer, trl.SFTConfig) if verb == "sft" else (trl.DPOTrainer, trl.DPOConfig)
    config = config_class(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=BATCH,
        max_length=None,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta2=0.95,
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **own,
        **PLAIN,
    )
    trainer: Any = trainer_class(
        model=load(),
        args=config,
        train_dataset=Dataset.from_list([given[k] for k in order]),
        processing_class=AutoProcessor.from_pretrained(model_path),
        **({} if verb == "sft" else {"ref_model": load()}),
    )
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
