"""Six optimizer steps of TRL's SFTTrainer and of forge: the same losses and the same gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is the oracle of this file")

STEPS, ACCUMULATION, MICRO = 6, 4, 2
RATE = 1e-3


def ragged(number: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(input_ids, labels) of very unequal lengths and shares of learned tokens."""
    rng = np.random.default_rng(7)
    samples = []
    for _ in range(number):
        ids = rng.integers(3, 200, size=int(rng.integers(4, 40)))
        labels = np.where(rng.random(len(ids)) < rng.uniform(0.2, 1), ids, -100)
        labels[0], labels[-1] = -100, ids[-1]
        samples.append((ids, labels))
    return samples


def saved(path: Path, kind: str) -> Path:
    """Save a tiny Llama or Qwen3-MoE."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    shape = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(**shape)
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.5}
        config = Qwen3MoeConfig(**shape, **experts, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(("kind", "coefficient"), [("llama", None), ("qwen3_moe", None), ("qwen3_moe", 2.0)])
def test_six_steps(kind: str, coefficient: float | None, tmp_path: Path) -> None:
    """Sequential order, 4 ragged micro-batches, binding clipping, AdamW, a linear schedule: loss and gradient norm to 1e-5.

    A mixture of experts with TRL's mean of the micro-batches' auxiliary losses, and so with TRL's cut.
    """
    model_path, samples = saved(tmp_path / "model", kind), ragged(STEPS * ACCUMULATION * MICRO)
    size = ACCUMULATION * MICRO
    # A dense model's step is cut otherwise than TRL cuts it: three micro-batches of unequal size.
    cuts = (
        [slice(0, 3), slice(3, 4), slice(4, size)] if kind == "llama" else [slice(k, k + MICRO) for k in range(0, size, MICRO)]
    )
    theirs, ours = _trl(model_path, samples, tmp_path, coefficient), _forge(model_path, samples, cuts, coefficient)
    assert len(ours) == len(theirs) == STEPS
    assert all(norm > 0.5 for _, norm in ours), "clipping at 0.5 is to bind in every step"
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def _trl(model_path: Path, samples: Any, scratch: Path, coefficient: float | None) -> list[tuple[float, float]]:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 199}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = SFTConfig(
        output_dir=str(scratch),
        max_steps=STEPS,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATION,
        max_length=None,
        train_sampling_strategy="sequential",
        learning_rate=RATE,
        lr_scheduler_type="linear",
        warmup_steps=0,
        optim="adamw_torch",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=0.5,
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        router_aux_loss_coef=coefficient,
    )
    rows = {"input_ids": [ids.tolist() for ids, _ in samples], "labels": [labels.tolist() for _, labels in samples]}
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype="float32"),
        args=config,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]


def _forge(model_path: Path, samples: Any, cuts: list[slice], coefficient: float | None) -> list[tuple[float, float]]:
    import torch

    import forge_accel
    import forge_algos
    import forge_dist
    import forge_packing

    machine = forge_accel.accelerator("cpu")
    attention = machine.attention("auto", torch.float32).value
    model = forge_dist.load_model(
        str(model_path),
        dtype=torch.float32,
        device=machine.device.value,
        attention=attention.name,
        attention_function=attention.function,
    )
    settings = forge_algos.OptimizerSettings(learning_rate=RATE, lr_scheduler="linear", max_grad_norm=0.5)
    optimizer = forge_algos.make_optimizer(model, settings)
    size = ACCUMULATION * MICRO
    steps = ([forge_packing.collate(samples[step * size : (step + 1) * size][cut]) for cut in cuts] for step in range(STEPS))
    return [
        (output.loss, output.grad_norm)
        for output in forge_algos.train(
            model,
            steps,
            objective=forge_algos.SFT(),
            optimizer=optimizer,
            scheduler=forge_algos.schedule(optimizer, settings, num_steps=STEPS),
            max_grad_norm=settings.max_grad_norm,
            moe_aux_loss="trl",
            router_aux_loss_coef=coefficient,
        )
    ]
