"""Models under OSFT, runs of them, and naive singular vectors to test their rules."""

import torch

from forge_algos import SFT, AdapterSettings, OptimizerSettings, adapt, make_optimizer, schedule, train

from .oracle import make, pack, samples

STRICT = {"direct": {}, "factors": {"osft_form": "factors"}}
RULES = {**STRICT, "paper": {"osft_rule": "paper"}}
LENGTHS = (9, 5, 7)


def osft(model=None, **changes):
    return adapt(make() if model is None else model, AdapterSettings(adapter="osft", **changes))


def steps(number, *, micro_batches=1):
    """Return two steps of three documents in turn, each cut into so many micro-batches."""
    data = [samples(LENGTHS, seed=step % 2) for step in range(number)]
    return [[pack(step[i::micro_batches]) for i in range(micro_batches)] for step in data]


def settings_of(**changes):
    return OptimizerSettings(**{"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, **changes})


def run(adaptation, data, config=None, *, optimizer=None, **how):
    """Return outputs of a run over `data`, continuing with `optimizer` where one is given."""
    config = config or settings_of()
    model = adaptation.model
    optimizer = make_optimizer(model, config) if optimizer is None else optimizer
    scheduler = schedule(optimizer, config, len(data))
    clip = config.max_grad_norm
    return list(
        train(
            model,
            data,
            objective=SFT(),
            optimizer=optimizer,
            scheduler=scheduler,
            max_grad_norm=clip,
            adaptation=adaptation,
            **how,
        )
    )


def learns(outputs):
    """Return whether the last two steps' losses are below the first two's."""
    return sum(o.loss for o in outputs[-2:]) < sum(o.loss for o in outputs[:2])


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def moved(adaptation, before):
    """Return target → float64[..., N, M]: what was added to its weight since `before`."""
    now = adaptation.model.state_dict()
    found = {}
    for name, entry in adaptation.plan.items():
        key = weight_of(name, entry)
        found[name] = adaptation.plain(key, now[key].double()) - before[key].double()
    return found


def weight_of(name, entry):
    """Return the name of a target's weight from its entry in the plan."""
    return entry.get("tensor", f"{name}.weight")


def protected(before, plan):
    """Return target → (U_h [..., N, k], V_h [..., M, k]) in float64, by torch alone."""
    found = {}
    for name, entry in plan.items():
        U, _, Vh = torch.linalg.svd(before[weight_of(name, entry)].double(), full_matrices=False)
        found[name] = U[..., : entry["protected"]], Vh[..., : entry["protected"], :].mT
    return found


def leaks(adaptation, before):
    """Return the largest shares of any target's change that lie in protected directions.
    (on the left, on the right, on both).
    """
    bases = protected(before, adaptation.plan)
    found = []
    for name, move in moved(adaptation, before).items():
        U_h, V_h = bases[name]
        size = move.norm()
        assert size > 1e-4
        found.append([float(part.norm() / size) for part in (U_h.mT @ move, move @ V_h, U_h.mT @ move @ V_h)])
    return [max(column) for column in zip(*found, strict=True)]
