"""Reward models: two scalars a pair, margins, centring, accuracy, adapters."""

import numpy as np
import pytest
import torch

from forge_algos import AdapterSettings, LossError, PackedBatchError, Reward, RewardSettings, adapt, evaluate

from ...oracle import CPU, distance, make
from ...preferences import a_classifier, loss_and_gradients, naive_reward, one_step, pair_batch, some_pairs

PAIRS = some_pairs(6, seed=71)
MARGINS = np.linspace(-0.5, 2.0, 6, dtype=np.float32)


@pytest.mark.parametrize("margins", [None, MARGINS])
@pytest.mark.parametrize("centering", [0.0, 0.1])
def test_the_loss_and_its_figures(margins, centering):
    """Bradley-Terry with and without margins and centring; accuracy and mean reward."""
    model = a_classifier()
    parts = [pair_batch(PAIRS[cut], margins=None if margins is None else margins[cut]) for cut in (slice(2), slice(2, 6))]
    found = evaluate(model, parts, objective=Reward(RewardSettings(centering=centering)))
    assert found.loss == pytest.approx(naive_reward(model, PAIRS, margins=margins, centering=centering).item(), rel=1e-5)
    rewards = np.array(
        [[model(torch.tensor(np.concatenate([p, y]))[None], use_cache=False).logits.item() for y in both] for p, *both in PAIRS]
    )
    assert found.figures == pytest.approx(
        {
            "accuracy": (rewards[:, 0] > rewards[:, 1]).mean(),
            "margin": (rewards[:, 0] - rewards[:, 1]).mean(),
            "chosen_reward": rewards[:, 0].mean(),
            "rejected_reward": rewards[:, 1].mean(),
            "mean_reward": rewards.mean(),
        },
        rel=1e-4,
    )


def test_lora_trains_the_adapters_and_the_score():
    """With trained adapters loss and gradients are the naive ones, of the whole `score` too."""
    torch.manual_seed(0)
    model = adapt(a_classifier(), AdapterSettings(adapter="lora", lora_r=3)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    output, grads = one_step(model, Reward(), [pair_batch(PAIRS[:4]), pair_batch(PAIRS[4:])])
    loss, theirs = loss_and_gradients(model, naive_reward(model, PAIRS))
    assert output.loss == pytest.approx(loss, rel=1e-5)
    assert distance(grads, theirs) < 1e-5
    assert {"score" if "score" in name else "lora" for name in grads if "lora" in name or "score" in name} == {"score", "lora"}
    assert len(grads) == 29


def test_what_is_no_reward_model_is_refused():
    """A language model is refused by name: it has no scalar."""
    with pytest.raises(LossError, match="no layer `score`"):
        Reward().bind(make(), device=CPU)


def test_margins_of_another_length_are_refused():
    """Margins that are not one a pair are refused."""
    with pytest.raises(PackedBatchError, match=r"margins: 6 numbers are wanted for 6 pairs, got \[12\]"):
        Reward().count(pair_batch(PAIRS, margins=np.zeros(12, np.float32)))
