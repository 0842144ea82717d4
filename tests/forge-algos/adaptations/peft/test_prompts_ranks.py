"""Virtual tokens and adaption prompts under fsdp2 on two processes equal one process.

Skipped where this package is installed alone: it agrees with forge_dist by shape and does not need it.
"""

import numpy as np
import pytest
import torch

from forge_algos import (
    DPO,
    SFT,
    AdapterSettings,
    DPOSettings,
    OptimizerSettings,
    adapt,
    evaluate,
    make_optimizer,
    schedule,
    train,
)

from ....ranks import run_on_ranks
from ...oracle import CPU, make, pack, samples
from ...preferences import pair_batch, some_pairs

pytest.importorskip("forge_dist", reason="forge_dist is not installed beside forge_algos")

pytestmark = [pytest.mark.slow, pytest.mark.together]

# Adam's eps at 1e-3: a gradient of 1e-7 divided by its own root would turn rounding into a step.
OPTIMIZER = OptimizerSettings(learning_rate=0.03, eps=1e-3, weight_decay=0.1, warmup_steps=1, max_grad_norm=0.5)
OBJECTIVES = {"sft": SFT(), "dpo": DPO(DPOSettings(reference="adapter_off"))}
KINDS = {
    "prefix": AdapterSettings(adapter="prefix", num_virtual_tokens=3),
    "projected": AdapterSettings(adapter="prefix", num_virtual_tokens=3, prefix_projection=True),
    "prompt": AdapterSettings(adapter="prompt", num_virtual_tokens=3),
    "adapter_prompt": AdapterSettings(adapter="adapter_prompt", num_virtual_tokens=3),
}
# Untied, the embedding is gathered by itself; tied, with the whole model's last part.
CASES = [
    *((kind, name, "llama-tied") for kind in KINDS for name in OBJECTIVES),
    ("prompt", "sft", "llama-untied"),
    ("prefix", "dpo", "llama-untied"),
]


def batch_of(name, number, share):
    """Return this rank's part of a step, in one row."""
    if name == "sft":
        return pack(samples((5, 9, 2, 7, 4), seed=number)[share])
    return pair_batch(some_pairs(5, seed=number)[share])


def run(folder, case, strategy=None, rank=0, world_size=1):
    """Return [(loss, norm) of three steps, then the held-out loss] and the adapter's weights."""
    from transformers import AutoModelForCausalLM

    kind, name, architecture = case
    path, share = f"{folder}/{architecture}", slice(rank, None, world_size)
    if strategy is None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        model = strategy.load(path, dtype=torch.float32, attention="sdpa")
        strategy.settle(model)
    torch.manual_seed(5)
    model = adapt(model, KINDS[kind]).model
    if strategy is None:
        optimizer, common = make_optimizer(model, OPTIMIZER), {}
    else:
        model, optimizer = strategy.wrap(model, lambda module: make_optimizer(module, OPTIMIZER))
        common = {"parallel": strategy}
    common |= {"objective": OBJECTIVES[name], "device": CPU}
    # In step 2 the last rank has nothing.
    steps = [
        [batch_of(name, number, share if number != 2 else slice(0 if rank else None, 0 if rank else None))]
        for number in range(3)
    ]
    outputs = train(model, steps, optimizer=optimizer, scheduler=schedule(optimizer, OPTIMIZER, 3), max_grad_norm=0.5, **common)
    figures = [[output.loss, output.grad_norm] for output in outputs]
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters() if p.requires_grad}
    return figures, evaluate(model, [batch_of(name, 9, share)], **common).loss, weights


def on_rank(ranks, folder):
    """Return every case's figures and weights."""
    import forge_dist

    found = []
    for case in CASES:
        settings = forge_dist.StrategySettings(strategy="fsdp2")
        strategy = forge_dist.make_strategy(settings, ranks, device=CPU, adapter=True)
        found.append(run(folder, case, strategy, ranks.rank, ranks.world_size))
    return found


def test_fsdp2(tmp_path):
    """Losses, norms and weights of two ranks are those of one process.
    Both ranks' adapters have the same bits.
    """
    for architecture in ("llama-tied", "llama-untied"):
        make(architecture).save_pretrained(tmp_path / architecture)
    ranks = run_on_ranks(on_rank, 2, str(tmp_path))
    for case, *results in zip(CASES, *ranks, strict=True):
        figures, held_out, weights = run(tmp_path, case)
        for mine, loss, theirs in results:
            np.testing.assert_allclose(mine, figures, rtol=1e-4, err_msg=str(case))
            assert loss == pytest.approx(held_out, rel=1e-4)
            assert theirs.keys() == weights.keys()
            for name in weights:
                np.testing.assert_allclose(theirs[name], weights[name], rtol=1e-3, atol=2e-4, err_msg=f"{case} {name}")
        assert {name: w.tobytes() for name, w in results[0][2].items()} == {
            name: w.tobytes() for name, w in results[1][2].items()
        }
