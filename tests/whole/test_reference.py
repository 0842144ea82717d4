"""The oracle itself against torch, transformers and PEFT: loss, AdamW, schedule and LoRA."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from . import reference, tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny saved Llama."""
    return tiny.save("llama-untied", tmp_path_factory.mktemp("llama"))


def test_the_loss_of_one_sample_is_the_one_that_transformers_computes(directory: str) -> None:
    """Sum over count is the mean that `model(labels=...)` returns, for every sample that has a trained token."""
    model = tiny.plain(directory)
    compared = 0
    for sample in tiny.ragged():
        total, count = reference.sample_loss(model, sample)
        if count:
            theirs = model(torch.tensor([sample.input_ids]), labels=torch.tensor([sample.labels]), use_cache=False).loss
            assert (total / count).item() == pytest.approx(theirs.item(), rel=1e-6)
            compared += 1
    assert compared >= 5


def test_the_batch_is_divided_once_by_all_its_tokens(directory: str) -> None:
    """The loss of a batch is the mean over its tokens, not the mean of its samples' means."""
    model = tiny.plain(directory)
    terms = [reference.sample_loss(model, sample) for sample in tiny.ragged()[:4]]
    loss, count, _ = reference.loss_and_gradients(model, tiny.ragged()[:4])
    assert count == sum(tokens for _, tokens in terms)
    assert loss == pytest.approx(sum(total.item() for total, _ in terms) / count, rel=1e-6)
    means = [total.item() / tokens for total, tokens in terms if tokens]
    assert loss != pytest.approx(sum(means) / len(means), rel=1e-3)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_and_clipping_are_torchs(directory: str, weight_decay: float) -> None:
    """Six steps with clipping give the weights that torch.optim.AdamW and torch's clip_grad_norm_ give."""
    ours, theirs = tiny.plain(directory), tiny.plain(directory)
    recipe = reference.Recipe(1e-3, 6, 2, weight_decay=weight_decay, max_grad_norm=0.5)
    batches = [tiny.ragged()[i : i + 4] for i in range(6)]
    reference.train(ours, batches, recipe, lambda _name, _parameter: True)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    for number, batch in enumerate(batches, start=1):
        _, _, gradients = reference.loss_and_gradients(theirs, batch)
        for name, parameter in theirs.named_parameters():
            parameter.grad = gradients[name]
        assert torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5) > 0.5
        optimizer.param_groups[0]["lr"] = reference.learning_rate(number, recipe)
        optimizer.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm(), name


def test_the_schedule_passes_through_its_landmarks() -> None:
    """A tenth a step up over the warm-up, the peak right after it, half-way the half, and close to zero in the last step."""
    recipe = reference.Recipe(1.0, 110, 10)
    assert [reference.learning_rate(step, recipe) for step in (1, 5, 10, 11, 61)] == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5])
    assert 0 < reference.learning_rate(110, recipe) < 1e-3
    assert reference.learning_rate(61, recipe._replace(lr_scheduler="linear")) == pytest.approx(0.5)
    assert reference.learning_rate(110, recipe._replace(lr_scheduler="constant")) == 1.0


def test_lora_is_pefts(directory: str) -> None:
    """With PEFT's A and B, the hand-written low-rank layers give PEFT's logits, which are not the base model's."""
    sample = tiny.ragged()[0]
    base = reference.sample_logits(tiny.plain(directory), sample)
    config = LoraConfig(r=3, lora_alpha=12.0, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft = get_peft_model(tiny.plain(directory), config)
    ours = tiny.plain(directory)
    reference.add_low_rank(ours, tiny.low_rank_pairs(peft), scaling=4.0)
    assert (reference.sample_logits(ours, sample) - reference.sample_logits(peft, sample)).abs().max() <= 1e-5
    assert (reference.sample_logits(ours, sample) - base).abs().max() > 1e-2
