"""KL to a reference that follows the model (TR-DPO), against a second model that is moved by hand."""

import copy

import numpy as np
import pytest
import torch

from forge_algos import (
    GRPO,
    PPO,
    RLOO,
    AdapterSettings,
    GRPOSettings,
    OptimizerSettings,
    PPOSettings,
    RLOOSettings,
    WeightAverage,
    adamw,
    adapt,
    schedule,
    train,
)
from forge_algos.online import attach_value_head, rollout_batches

from ..digits import digit_model, prompts, rollout

OWN = {"num_generations": 3, "max_new_tokens": 5, "reference": "moving", "reference_mixup": 0.6}
METHODS = {
    "grpo": (GRPO, GRPOSettings(kl_weight=0.5, reference_sync_steps=1, **OWN)),
    "rloo": (RLOO, RLOOSettings(kl_weight=0.5, reference_sync_steps=2, **OWN)),
    # Two updates on each rollout, in the middle of which the reference moves: it is asked at the next.
    "ppo": (PPO, PPOSettings(kl_weight=0.5, reference_sync_steps=3, num_iterations=2, **OWN)),
}
OPTIMIZER = OptimizerSettings(learning_rate=2e-2, lr_scheduler="constant")


def run(name, adapter="none", *, by_hand=False):
    """Return the rollouts and the losses of three rollouts' updates."""
    objective, settings = METHODS[name]
    model = digit_model(1, size=0.3)
    if name == "ppo":
        attach_value_head(model)
    if adapter != "none":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = adapt(model, AdapterSettings(adapter=adapter, **({"lora_r": 3} if adapter == "lora" else {}))).model
    other = copy.deepcopy(model).requires_grad_(requires_grad=False)
    optimizer = adamw(model, OPTIMIZER)
    average = None if by_hand else WeightAverage(optimizer, settings.reference_mixup, every=settings.reference_sync_steps)
    made, losses = [], []

    def steps():
        for seed in range(3):
            reference = other if average is None else average.exchanged
            made.append(rollout(model, settings, asked=prompts(3), seed=seed, reference=reference, max_tokens=60))
            yield from rollout_batches(made[-1], max_tokens=60, passes=settings.num_iterations)

    scheduler = schedule(optimizer, OPTIMIZER, num_steps=9)
    for output in train(
        model, steps(), objective=objective(settings), optimizer=optimizer, scheduler=scheduler, average=average
    ):
        losses.append(output.loss)
        if by_hand and output.step % settings.reference_sync_steps == 0:
            with torch.no_grad():
                for old, new in zip(other.parameters(), model.parameters(), strict=True):
                    old.mul_(1 - settings.reference_mixup).add_(new, alpha=settings.reference_mixup)
    return made, losses


@pytest.mark.parametrize(("name", "adapter"), [*((name, "none") for name in METHODS), ("grpo", "lora"), ("rloo", "osft")])
def test_equals_a_second_model_that_is_moved(name, adapter):
    """The same completions, of the trained weights; the same log-probabilities under the reference; the same losses."""
    (made, losses), (wanted, wanted_losses) = run(name, adapter), run(name, adapter, by_hand=True)
    for one, other in zip(made, wanted, strict=True):
        assert one.completion_texts == other.completion_texts
        np.testing.assert_allclose(one.old_logps, other.old_logps, atol=1e-4)
        np.testing.assert_allclose(one.ref_logps, other.ref_logps, atol=1e-4)
    assert losses == pytest.approx(wanted_losses, rel=1e-3, abs=1e-5)
    # It is neither the model as it began, nor the trained one.
    assert np.abs(made[0].ref_logps - made[0].old_logps).max() < 1e-4
    assert np.abs(made[-1].ref_logps - made[-1].old_logps).max() > 1e-2
