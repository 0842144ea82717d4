"""Rollouts and updates on gloo processes under forge_dist's strategies equal one process.

Skipped where this package is installed alone: it agrees with forge_dist by shape and does not need it.
"""

import numpy as np
import pytest
import torch

from forge_algos import (
    GRPO,
    PPO,
    AdapterSettings,
    GRPOSettings,
    OptimizerSettings,
    PPOSettings,
    adamw,
    adapt,
    schedule,
    train,
)
from forge_algos.online import attach_value_head, rollout_batches

from ...ranks import run_on_ranks
from ..digits import digit_model, prompts, rollout, sampler
from ..oracle import CPU

pytest.importorskip("forge_dist", reason="forge_dist is not installed beside forge_algos")

pytestmark = [pytest.mark.slow, pytest.mark.together]

# Adam's eps at 1e-3: a gradient of 1e-7 divided by its own root would turn rounding into a step.
OPTIMIZER = OptimizerSettings(learning_rate=1e-2, eps=1e-3, lr_scheduler="constant")
PPO_SETTINGS = PPOSettings(num_generations=2, max_new_tokens=6, kl_weight=0.1, num_iterations=2, updates_per_pass=2)
GRPO_SETTINGS = GRPOSettings(num_generations=3, max_new_tokens=6, kl_weight=0.1)


def run(strategy, folder, method, number, rank=0):
    """Return [(rollout, outputs)] of two rollouts of `number` prompts.
    The second by the policy that the first has trained.
    """
    from transformers import AutoModelForCausalLM

    options = {}
    if strategy is None:
        model, frozen = (AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa") for _ in range(2))
    else:
        model, frozen = (strategy.load(folder, dtype=torch.float32, attention="sdpa") for _ in range(2))
        options = {"parallel": strategy}
    reference = frozen
    if method == "lora":
        torch.manual_seed(5)
        if strategy is not None:
            strategy.settle(model)
        model, reference = adapt(model, AdapterSettings(adapter="lora", lora_r=3)).model, "adapter_off"
    if method == "ppo":
        attach_value_head(model)
    make = lambda module: adamw(module, OPTIMIZER)  # noqa: E731
    model, optimizer = (model, make(model)) if strategy is None else strategy.wrap(model, make)
    objective = PPO(PPO_SETTINGS) if method == "ppo" else GRPO(GRPO_SETTINGS)
    divided = getattr(strategy, "name", "single") == "fsdp2"
    draw = sampler(model, batch_tokens=40, synced=divided, **options)
    made = []

    def steps():
        for seed in range(2):
            made.append(
                rollout(
                    model,
                    objective.settings,
                    asked=prompts(number),
                    seed=seed,
                    sampler=draw,
                    max_tokens=30,
                    reference=reference,
                    device=CPU,
                    rank=rank,
                    **options,
                )
            )
            passes, updates = objective.settings.num_iterations, objective.settings.updates_per_pass
            yield from rollout_batches(made[-1], max_tokens=30, passes=passes, updates=updates, rank=rank, **options)

    outputs = list(
        train(
            model,
            steps(),
            objective=objective,
            optimizer=optimizer,
            scheduler=schedule(optimizer, OPTIMIZER, 9),
            device=CPU,
            **options,
        )
    )
    return made, [(o.loss, o.grad_norm, dict(o.figures), o.loss_count, o.samples) for o in outputs]


CASES = (("fsdp2", "ppo", 5), ("fsdp2", "lora", 3), ("fsdp2", "grpo", 1), ("ddp", "ppo", 4))


def on_rank(ranks, folder):
    import forge_dist

    found = []
    for name, method, number in CASES:
        settings = forge_dist.StrategySettings(strategy=name)
        strategy = forge_dist.make_strategy(settings, ranks, device=CPU, adapter=method == "lora")
        found.append(run(strategy, folder, method, number, ranks.rank))
    return found


def test_real_ranks_equal_one_process(tmp_path):
    """Completions, figures and losses are one process's, with divided and copied weights.
    With a value head, an adapter, a rank without a prompt.
    """
    digit_model(size=0.3).save_pretrained(tmp_path)
    folder = str(tmp_path)
    for results in zip(*run_on_ranks(on_rank, 2, folder), CASES, strict=True):
        *ranks, (_, method, number) = results
        expected, outputs = run(None, folder, method, number)
        for made, found in ranks:
            for one, other in zip(made, expected, strict=True):
                assert one.completion_texts == other.completion_texts
                np.testing.assert_allclose(one.old_logps, other.old_logps, rtol=0, atol=1e-4)
                np.testing.assert_allclose(one.ref_logps, other.ref_logps, rtol=0, atol=1e-4)
                np.testing.assert_allclose(one.advantages, other.advantages, rtol=1e-3, atol=1e-3)
            assert len(found) == len(outputs)
            for (loss, norm, figures, *counts), (wanted, wanted_norm, wanted_figures, *wanted_counts) in zip(
                found, outputs, strict=True
            ):
                assert counts == wanted_counts
                assert loss == pytest.approx(wanted, rel=1e-3, abs=1e-4)
                assert norm == pytest.approx(wanted_norm, rel=1e-2, abs=1e-4)
                assert figures == pytest.approx(wanted_figures, rel=1e-2, abs=1e-3)
