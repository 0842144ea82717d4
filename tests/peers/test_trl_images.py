"""Steps of TRL's SFT-, DPO- and KTOTrainer, and of forge's on rows with images: the same losses and gradient norms."""

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


def answers(number: int) -> list[dict[str, Any]]:
    """The same prompts with one of two answers in turn.

    So the mismatched answer is the same whether it is the next row's, or as in TRL that of the row before in the batch.
    """
    texts = ("a cat", "it is it what is")
    return [
        {
            **row,
            "completion": [{"role": "assistant", "content": [{"type": "text", "text": texts[at % 2]}]}],
            "label": at % 3 > 0,
        }
        for at, row in enumerate(rows(number))
    ]


DATA = {"sft": rows, "dpo": pairs, "kto": answers}


# Which parts train is no matter of the loss: with pairs in the lane.
CASES = [*((verb, False) for verb in DATA), ("sft", True), pytest.param("dpo", True, marks=pytest.mark.lane)]


@pytest.mark.parametrize(("verb", "every_part"), CASES)
def test_three_steps(verb: str, every_part: bool, tmp_path: Path) -> None:
    """The order of forge's plan, one micro-batch a step, clipping, AdamW: loss and gradient norm to 1e-5.

    TRL trains every part of a model, as forge does where none is frozen.
    """
    import forge

    model_path, number = saved(tmp_path / "model"), STEPS * BATCH
    theirs = _trl(verb, model_path, DATA[verb](number), tmp_path, every_part=every_part)
    getattr(forge, verb)(
        model_path=str(model_path),
        # Made anew: TRL's collator takes the text of rows in place.
        data_path=DATA[verb](number),
        shuffle=verb != "kto",
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
    steps = [line for line in lines if "loss" in line]
    ours = [(line["loss"], line["grad_norm"]) for line in steps]
    assert verb != "kto" or max(line["kl"] for line in steps) > 0
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def _trl(verb: str, model_path: Path, given: Any, scratch: Path, *, every_part: bool) -> list[tuple[float, float]]:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor

    import forge_packing

    plan = forge_packing.plan([9] * len(given), batch_size=BATCH, max_tokens=9, seed=42, epochs=1, shuffle=verb != "kto")
    order = np.concatenate([plan.samples(step) for step in range(STEPS)])

    def load() -> Any:
        model = AutoModelForImageTextToText.from_pretrained(model_path, dtype="float32", attn_implementation="eager")
        model.requires_grad_(every_part)
        for part in (model.get_decoder(), model.get_output_embeddings()):
            part.requires_grad_(True)
        return model

    own: dict[str, Any] = {"completion_only_loss": True} if verb == "sft" else {"beta": 0.1}
    trainer_class, config_class = (getattr(trl, f"{verb.upper()}{kind}") for kind in ("Trainer", "Config"))
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


GROUPS, EACH, ONLINE_STEPS = 2, 3, 3


def completions_of(end: int) -> list[list[list[int]]]:
    """Made-up completions of each step's prompts, in groups; each ends."""
    draw = np.random.default_rng(5)
    return [
        [[*draw.integers(20, 250, int(draw.integers(2, 9))).tolist(), end] for _ in range(GROUPS * EACH)]
        for _ in range(ONLINE_STEPS)
    ]


def score(ids: Any) -> float:
    """A reward that follows from the tokens."""
    return sum(map(int, ids)) % 97 / 97


@pytest.mark.parametrize("verb", ["grpo", pytest.param("rloo", marks=pytest.mark.lane)])
def test_given_completions(verb: str, tmp_path: Path) -> None:
    """Steps on recorded completions of prompts with one image and with two, beside a KL: loss and gradient norm to 1e-4."""
    from transformers import AutoTokenizer

    model_path = saved(tmp_path / "model")
    made = completions_of(AutoTokenizer.from_pretrained(model_path).eos_token_id)
    theirs = _trl_online(verb, model_path, made, tmp_path)
    np.testing.assert_allclose(_ours_online(verb, model_path, made, tmp_path), theirs, rtol=1e-4, atol=1e-6)


def _trained(model_path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype="float32", attn_implementation="eager")
    model.requires_grad_(False)
    for part in (model.get_decoder(), model.get_output_embeddings()):
        part.requires_grad_(True)
    return model


def _asked() -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "images": row["images"]} for row in rows(ONLINE_STEPS * GROUPS)]


def _trl_online(verb: str, model_path: Path, made: list[list[list[int]]], scratch: Path) -> list[tuple[float, float]]:
    import trl
    from datasets import Dataset
    from transformers import AutoProcessor

    trainer_class: Any = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[verb]
    config_class: Any = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[verb]
    given = iter(made)

    class Recorded(trainer_class):
        def _generate_single_turn(self, *_args: Any, **_kwargs: Any) -> Any:
            found = next(given)
            return (found, None) if verb == "grpo" else found

    config = config_class(
        output_dir=str(scratch / "trl"),
        max_steps=ONLINE_STEPS,
        per_device_train_batch_size=GROUPS * EACH,
        gradient_accumulation_steps=1,
        num_generations=EACH,
        max_completion_length=16,
        beta=0.3,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta2=0.95,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        activation_checkpointing=False,
        shuffle_dataset=False,
        **{name: value for name, value in PLAIN.items() if name != "max_steps"},
        **({"loss_type": "dapo"} if verb == "grpo" else {"normalize_advantages": False}),
    )
    trainer = Recorded(
        model=_trained(model_path),
        args=config,
        # Its token types are padded on this side, where its prompts are.
        processing_class=AutoProcessor.from_pretrained(model_path, padding_side="left"),
        reward_funcs=[lambda completion_ids, **_: [score(ids) for ids in completion_ids]],
        train_dataset=Dataset.from_list(_asked()),
    )
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]


def _ours_online(verb: str, model_path: Path, made: list[list[list[int]]], scratch: Path) -> list[tuple[float, float]]:
    from types import SimpleNamespace

    import torch

    import forge_algos
    import forge_data
    from forge_algos import online

    common: dict[str, Any] = {"num_generations": EACH, "max_new_tokens": 16, "kl_weight": 0.3, "reward": ("a:b",)}
    if verb == "grpo":
        objective: Any = forge_algos.GRPO(forge_algos.GRPOSettings(**common, loss_type="dapo", kl_estimator="unbiased"))
    else:
        objective = forge_algos.RLOO(forge_algos.RLOOSettings(**common))
    store, inputs = (
        forge_data.prepare_prompts(_asked(), str(model_path), scratch / "store", media=True),
        forge_data.MediaInputs(model_path),
    )
    images = {row: inputs(prompt) for row, prompt in enumerate(store)}
    model, still = _trained(model_path), _trained(model_path)
    cpu = torch.device("cpu")
    for each in (model, still):
        forge_algos.keep_documents_apart(each, device=cpu)
        documents = [
            forge_algos.MediaDocument(store[row].input_ids, images[row], [(one.start, one.stop) for one in store[row].media])
            for row in range(2)
        ]
        assert forge_algos.pack_media(each, documents, device=cpu)[0] == "lines"
    settings = forge_algos.OptimizerSettings(learning_rate=RATE, lr_scheduler="constant", max_grad_norm=0.5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def steps() -> Any:
        for step, ids in enumerate(made):
            drawn = [online.Completion(ids=np.array(one, np.int32), finished=True) for one in ids]
            chosen = range(step * GROUPS, (step + 1) * GROUPS)
            how: dict[str, Any] = {"media": images, "layout": "lines", "max_tokens": 400}
            rollout = online.make_rollout(
                model,
                SimpleNamespace(sample=lambda *_args, drawn=drawn, **_kwargs: drawn),
                [store[row] for row in chosen],
                settings=objective.settings,
                rewards=[online.Reward(name="recorded", function=lambda ids=ids, **_: [score(one) for one in ids])],
                decode=lambda _ids: "",
                seed=0,
                rows=chosen,
                reference=still,
                **how,
            )
            yield from online.rollout_batches(rollout, **how)

    outputs = forge_algos.train(
        model,
        steps(),
        objective=objective,
        optimizer=optimizer,
        max_grad_norm=0.5,
        scheduler=forge_algos.schedule(optimizer, settings, num_steps=ONLINE_STEPS),
    )
    return [(output.loss, output.grad_norm) for output in outputs]
