"""Preference objectives on gloo processes under forge_dist's strategies equal one process.

Skipped where this package is installed alone: it agrees with forge_dist by shape and does not need it.
"""

import numpy as np
import pytest
import torch

from forge_algos import (
    DPO,
    KTO,
    ORPO,
    AdapterSettings,
    DPOSettings,
    KTOSettings,
    OptimizerSettings,
    Reward,
    adamw,
    adapt,
    check_reference,
    evaluate,
    reference_logps,
    schedule,
    train,
)

from ....ranks import run_on_ranks
from ...oracle import CPU, make
from ...preferences import a_classifier, kto_batch, pair_batch, rotated, some_pairs

pytest.importorskip("forge_dist", reason="forge_dist is not installed beside forge_algos")

pytestmark = [pytest.mark.slow, pytest.mark.together]

LORA = AdapterSettings(adapter="lora", lora_r=3)
# Adam's eps at 1e-3: a gradient of 1e-7 divided by its own root would turn rounding into a step.
OPTIMIZER = OptimizerSettings(learning_rate=1e-2, eps=1e-3, warmup_steps=1, max_grad_norm=0.5)
OBJECTIVES = {
    # (objective, whether it has an adapter, what it is loaded as)
    "dpo, adapter off": (lambda _: DPO(DPOSettings(loss_type=["sigmoid", "sft"], reference="adapter_off")), True, "causal"),
    "dpo, live": (lambda live: DPO(DPOSettings(reference="live"), reference=live), False, "causal"),
    "kto, live": (lambda live: KTO(KTOSettings(beta=0.5, reference="live"), reference=live), False, "causal"),
    "orpo": (lambda _: ORPO(), False, "causal"),
    "reward": (lambda _: Reward(), False, "reward"),
    "reward with an adapter": (lambda _: Reward(), True, "reward"),
}


def batch_of(name, pairs, cut=slice(None)):
    """Return some of the pairs, with their mismatched completions and kinds among all pairs."""
    if not name.startswith("kto"):
        return pair_batch(pairs[cut])
    return kto_batch(pairs[cut], (np.arange(len(pairs)) % 3 > 0)[cut], rotated(pairs)[cut])


def steps_of(name, rank, world_size):
    """Return three steps of two micro-batches.
    The last rank has nothing in step 2, and no rank in the second column of step 3.
    """
    found = []
    for number in range(1, 4):
        pairs = some_pairs(5, seed=number)
        cuts = [slice(3), slice(3, 5)] if number < 3 else [slice(5), slice(0)]
        batches = [batch_of(name, pairs, cut) for cut in cuts]
        empty = batch_of(name, [])
        if world_size == 1:
            found.append([*batches, empty, empty])
        elif number == 2:
            found.append([batches[0], batches[1]] if rank == 0 else [empty, empty])
        else:
            found.append([batches[rank], empty])
    return found


def run(strategy, folders, name, rank, world_size):
    """Return (losses, gradient norms, figures, evaluation, references, weights) of three steps."""
    make_objective, adapter, task = OBJECTIVES[name]
    load = loader(strategy, task)
    model = load(folders[task])
    live = load(folders["reference"]).requires_grad_(False) if name.endswith("live") else None
    if adapter:
        torch.manual_seed(5)
        if strategy is not None:
            strategy.settle(model)
        model = adapt(model, LORA).model
    if strategy is None:
        kind, optimizer = {}, adamw(model, OPTIMIZER)
    else:
        model, optimizer = strategy.wrap(model, lambda module: adamw(module, OPTIMIZER))
        kind = {"parallel": strategy}
    objective = make_objective(live)
    held_out = [batch_of(name, some_pairs(4, seed=9), slice(rank, None, world_size))]
    references = None
    if task == "causal":
        rows = held_out[0].completions if name.startswith("kto") else held_out[0].groups
        (references,) = reference_logps(model, [rows], adapter_off=adapter)
    if adapter and task == "causal":
        check_reference(model, held_out, objective=objective, **kind)
    outputs = list(
        train(
            model,
            steps_of(name, rank, world_size),
            objective=objective,
            optimizer=optimizer,
            scheduler=schedule(optimizer, OPTIMIZER, 3),
            max_grad_norm=OPTIMIZER.max_grad_norm,
            device=CPU,
            **kind,
        )
    )
    weights = {key.removeprefix("module."): whole(p.detach()) for key, p in model.named_parameters() if p.requires_grad}
    after = evaluate(model, held_out, objective=objective, device=CPU, **kind)
    return [(o.loss, o.grad_norm, o.loss_count) for o in outputs], outputs[-1].figures, after, references, weights


def loader(strategy, task):
    import transformers

    if strategy is not None:
        return lambda folder: strategy.load(folder, dtype=torch.float32, attention="sdpa", task=task)
    kind = transformers.AutoModelForCausalLM if task == "causal" else transformers.AutoModelForSequenceClassification
    return lambda folder: kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()


def whole(tensor):
    """Return all of a tensor, as numpy, which travels between processes."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).numpy()


def on_rank(ranks, cases, folders):
    """Return every case of (strategy, objective) → result of `run`."""
    import forge_dist

    found = []
    for strategy_name, name in cases:
        settings = forge_dist.StrategySettings(strategy=strategy_name)
        strategy = forge_dist.make_strategy(settings, ranks, device=CPU, adapter=OBJECTIVES[name][1])
        found.append(run(strategy, folders, name, ranks.rank, ranks.world_size))
    return found


def test_real_ranks_equal_one_process(tmp_path_factory):
    """Under ddp and fsdp2 losses, norms, figures, evaluations and weights are one process's.
    With references of all kinds, adapters and reward models.
    """
    folders = {}
    for key, model in (("causal", make()), ("reference", make(seed=8)), ("reward", a_classifier())):
        folders[key] = str(tmp_path_factory.mktemp(key))
        model.save_pretrained(folders[key])
    cases = [("fsdp2", name) for name in OBJECTIVES]
    cases += [("ddp", name) for name in ("dpo, adapter off", "kto, live", "reward with an adapter")]
    results = run_on_ranks(on_rank, 2, cases, folders)
    for (_, name), first, second in zip(cases, *results, strict=True):
        steps, figures, after, references, weights = run(None, folders, name, 0, 1)
        for rank, ours in enumerate((first, second)):
            np.testing.assert_allclose(ours[0], steps, rtol=1e-4, err_msg=name)
            assert ours[1] == pytest.approx(figures, rel=1e-4, abs=1e-5), name
            assert ours[2].loss == pytest.approx(after.loss, rel=1e-4), name
            assert ours[2].figures == pytest.approx(after.figures, rel=1e-4, abs=1e-5), name
            if references is not None and not name.startswith("kto"):
                np.testing.assert_allclose(ours[3].reshape(-1, 2), references.reshape(-1, 2)[rank::2], rtol=1e-5)
            assert ours[4].keys() == weights.keys()
            for key, weight in weights.items():
                np.testing.assert_allclose(ours[4][key], weight, rtol=1e-3, atol=1e-5, err_msg=f"{name}: {key}")
