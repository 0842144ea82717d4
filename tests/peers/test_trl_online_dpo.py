"""TRL's OnlineDPOTrainer beside `forge grpo` with loss_type=online_dpo: the same loss and gradients of sampled pairs."""

from __future__ import annotations

import collections
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_algos import GRPOSettings
from forge_algos.losses import policy_gradient
from forge_algos.online._credit import Scored, pair

trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

B, BETA = 5, 0.3


def of_trl(leaf, reference, mask, rewards, kind):
    """TRL's training step on given log-probabilities float[2B, S] and rewards[2B]: its loss; gradients reach the leaf."""
    from trl.experimental.online_dpo import OnlineDPOTrainer

    model, frozen = SimpleNamespace(train=lambda: None), object()
    ids = torch.full(mask.shape, 7)
    args = SimpleNamespace(
        use_vllm=False, missing_eos_penalty=None, loss_type=kind, torch_empty_cache_steps=None, optim="adamw_torch",
        n_gpu=1, gradient_accumulation_steps=1,
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=args,
        ref_model=frozen,
        eos_token_ids=[1],
        beta=BETA,
        reward_funcs=[None],
        stats=collections.defaultdict(list),
        state=SimpleNamespace(global_step=0),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: ["text"] * len(ids)),
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, backward=lambda loss: loss.backward()),
        _generate=lambda *_: (ids[:, :1], mask[:, :1], ids, mask, None),
        _forward=lambda which, *_: reference if which is frozen else leaf,
        _calculate_rewards_from_functions=lambda **_: rewards,
    )
    return OnlineDPOTrainer.training_step(trainer, model, {"prompt": ["p"] * B})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kind", "loss_type"), [("sigmoid", "online_dpo"), ("ipo", "online_ipo")])
def test_loss(seed, kind, loss_type):
    """Two completions of each of five prompts, of any lengths and rewards that differ."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (2 * B,), generator=g)
    mask = (torch.arange(8) < lengths[:, None]).long()
    logps, reference = (-2 * torch.rand(2, 2 * B, 8, generator=g)).unbind()
    rewards = torch.randperm(2 * B, generator=g).float()
    leaf = logps.clone().requires_grad_()
    expected = of_trl(leaf, reference, mask, rewards, kind)

    # Ours has the completions of a prompt one after the other.
    order = torch.arange(2 * B).view(2, B).T.reshape(-1)
    flat = logps.clone().requires_grad_()
    new, ref = (each[order][mask[order].bool()] for each in (flat, reference))
    sizes = lengths[order]
    settings = GRPOSettings(loss_type=loss_type, kl_weight=BETA, num_generations=2)
    everything = np.ones(2 * B, bool)
    advantages = pair(
        settings,
        Scored(
            rewards=rewards[order].numpy(), parts={}, groups=np.repeat(np.arange(B), 2), lengths=sizes.numpy(),
            trained=everything, counted=everything, penalty=(BETA * (new - ref)).detach().numpy(), values=None,
        ),
    )  # fmt: skip
    terms = policy_gradient(new, new.detach(), torch.from_numpy(advantages), sizes, kind=loss_type)
    (terms.sum / terms.count).backward()
    assert terms.count == 2 * B
    losses = np.square(advantages / 4) if kind == "ipo" else -np.log1p(-np.abs(advantages) / (2 * BETA))
    assert losses.mean() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(flat.grad, leaf.grad * mask, rtol=1e-5, atol=1e-7)
