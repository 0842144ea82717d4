"""Optimizers other than AdamW: full states to the bit, on other ranks too, and what does not work is refused by name before
training.
"""

import pytest
import torch

import forge_dist
from forge_dist import CheckpointError, StrategyError

from ...ranks import run_on_ranks
from ..divided import CPU, DEEPSPEED, adapted, strategy_of
from ..training import Kept, alone, nll, row
from .test_choose import Some


class Both(torch.optim.Optimizer):
    """Muon on the layers' matrices and AdamW on the rest, in one list of groups, each of which names its algorithm."""

    def __init__(self, model):
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        matrices = [p for n, p in trained.items() if p.dim() == 2 and "layers" in n]
        others = [p for p in trained.values() if all(p is not m for m in matrices)]
        self._parts = {"muon": torch.optim.Muon(matrices, lr=1e-2)}
        if others:
            self._parts["adamw"] = torch.optim.AdamW(others, lr=1e-2)
        super().__init__([{**g, "algorithm": n} for n, part in self._parts.items() for g in part.param_groups], {"lr": 1e-2})

    def step(self):
        for name, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.state = self.state
            part.step()


class Averaging(torch.optim.SGD):
    """A mode, counts in its groups and a plain number for each parameter, as schedule-free and 8-bit optimizers have them."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2, momentum=0.9)
        for group in self.param_groups:
            group.update(k=0, weight_sum=0.0, lr_max=-1.0, scheduled_lr=0.0, train_mode=False)

    def step(self):
        super().step()
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += 1 / 3
            group["train_mode"] = True
            for parameter in group["params"]:
                self.state[parameter]["seen"] = group["k"] + 0.1


def matrices_and_vectors(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = ([p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1])
    return [{"params": group} for group in groups if group]


OPTIMIZERS = {
    "adafactor": lambda model: torch.optim.Adafactor(matrices_and_vectors(model), lr=1e-2),
    "adafactor, one group": lambda model: torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=1e-2),
    "muon": Both,
    "averaging": lambda model: Averaging(matrices_and_vectors(model)),
}


def start(ranks, name, path, optimizer, lora):
    strategy = strategy_of(ranks, name, adapter=lora)
    model = strategy.load(path, dtype=torch.float32)
    if lora:
        strategy.settle(model)
        model = adapted(model)
    model, made = strategy.wrap(model, OPTIMIZERS[optimizer])
    return strategy, model.train(), made


def train(strategy, model, optimizer, steps):
    """Losses of these steps, four rows each, as many on each rank."""
    losses = []
    for step in steps:
        strategy.zero_grad(optimizer)
        mine = range(strategy.ranks.rank, 4, strategy.world_size)
        total = 0.0
        for number in mine:
            with strategy.micro_batch(last=number == mine[-1]):
                loss = nll(model, row(step, number)) / 22
                strategy.backward(loss)
            total += loss.item()
        strategy.step(optimizer)
        losses += strategy.sum([total])
    return losses


def scenario(ranks, path, kinds, states):
    """kind → (losses of three steps, state after two, after three; of each of the states: as it arrived, a step later)"""
    found = {}
    for kind in kinds:
        strategy, model, optimizer = start(ranks, *kind[:1], path, *kind[1:])
        losses = train(strategy, model, optimizer, range(2))
        saved = Kept.of(strategy.state(model, optimizer))
        losses += train(strategy, model, optimizer, range(2, 3))
        later = Kept.of(strategy.state(model, optimizer))
        arrived = {}
        for key, state in {"own": saved, "other": states.get(kind[1:], saved)}.items():
            strategy, model, optimizer = start(ranks, *kind[:1], path, *kind[1:])
            strategy.load_state(model, optimizer, state)
            again = Kept.of(strategy.state(model, optimizer))
            train(strategy, model, optimizer, range(2, 3))
            arrived[key] = again, Kept.of(strategy.state(model, optimizer))
        found[kind] = losses, saved, later, arrived
    return found


KINDS = [(optimizer, lora) for optimizer in OPTIMIZERS for lora in (False, True)]
ON_TWO = [
    *(("ddp", optimizer, False) for optimizer in OPTIMIZERS),
    ("fsdp2", "muon", False),
    ("fsdp2", "averaging", False),
    ("fsdp2", "adafactor", True),  # adapters are whole on every rank
    ("fsdp2", "muon", True),
]


def same(first, second):
    return list(first) == list(second) and all(
        torch.equal(first[key], second[key]) and first[key].dtype == second[key].dtype for key in first
    )


@pytest.mark.slow
def test_goes_on_with_the_same_bits(save_base):
    """On one process, ddp and fsdp2: a state arrives bit for bit, from there and from the other number of ranks, and training
    goes on.
    """
    path = save_base("llama-untied")
    with alone() as ranks:
        one = {kind[1:]: found for kind, found in scenario(ranks, path, [("single", *kind) for kind in KINDS], {}).items()}
    states = {kind: saved for kind, (_, saved, _, _) in one.items()}
    two = run_on_ranks(scenario, 2, path, ON_TWO, states)[0]
    for kind, (losses, saved, later, arrived) in {**{("single", *kind): found for kind, found in one.items()}, **two}.items():
        assert same(arrived["own"][0], saved), kind
        assert same(arrived["own"][1], later), kind
        assert same(arrived["other"][0], states[kind[1:]]), kind
        # Muon computes in bfloat16, whose sums in another order are other numbers.
        assert losses == pytest.approx(one[kind[1:]][0], rel=2e-3 if kind[1] == "muon" else 1e-5), kind
    with alone() as ranks:  # and back
        back = scenario(
            ranks,
            path,
            [("single", *kind[1:]) for kind in two if kind[0] == "fsdp2"],
            {kind[1:]: saved for kind, (_, saved, _, _) in two.items() if kind[0] == "fsdp2"},
        )
    for kind, (_, _, _, arrived) in back.items():
        assert same(arrived["other"][0], two["fsdp2", *kind[1:]][1]), kind


@pytest.fixture
def averaging(base):
    """A strategy of one, and a model with an optimizer that has moved and counts for itself."""
    with alone() as ranks:
        strategy, model, optimizer = start(ranks, "single", base, "averaging", lora=False)
        train(strategy, model, optimizer, range(2))
        yield strategy, model, optimizer


def test_counts(averaging, base):
    """What an optimizer counts in its groups, and plain numbers, are in the state and come back as what they were."""
    strategy, model, optimizer = averaging
    state = Kept.of(strategy.state(model, optimizer))
    assert state["optimizer/group:1/k"].item() == 2
    assert state["optimizer/model.norm.weight/seen:number"].dtype == torch.float64
    fresh, other, second = start(strategy.ranks, "single", base, "averaging", lora=False)
    fresh.load_state(other, second, state)
    for group, expected in zip(second.param_groups, optimizer.param_groups, strict=True):
        assert [(type(group[key]), group[key]) for key in ("k", "weight_sum", "train_mode")] == [
            (int, 2),
            (float, expected["weight_sum"]),
            (bool, True),
        ]
    assert second.state[other.model.norm.weight]["seen"] == 2.1


def test_counts_that_are_missing(averaging):
    """A state without the counts does not fit, and nothing is changed."""
    strategy, model, optimizer = averaging
    state = Kept.of(strategy.state(model, optimizer))
    del state["optimizer/group:0/k"]
    optimizer.param_groups[0]["weight_sum"] = 7.0
    with pytest.raises(CheckpointError, match="the optimizer: it lacks optimizer/group:0/k"):
        strategy.load_state(model, optimizer, state)
    assert optimizer.param_groups[0]["weight_sum"] == 7.0


def refused(ranks, path, kinds):
    """What `wrap` says to each kind of optimizer."""
    found = {}
    for name, optimizer in kinds:
        try:
            start(ranks, name, path, optimizer, lora=False)
            found[name, optimizer] = ""
        except StrategyError as error:
            found[name, optimizer] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.together
def test_refused_before_training(base):
    """Adafactor over divided weights, and under ZeRO all that needs a weight's shape or counts for itself: named, with what
    works.
    """
    kinds = [("fsdp2", "adafactor"), ("fsdp2", "adafactor, one group")]
    if DEEPSPEED:
        kinds += [(name, optimizer) for name in ("zero1", "zero3") for optimizer in ("adafactor", "muon")]
    first, second = run_on_ranks(refused, 2, base, kinds)
    assert first == second
    for (name, optimizer), reported in first.items():
        assert reported.startswith(f"strategy={name}"), (name, optimizer)
        assert {"adafactor": "Adafactor", "muon": "Both"}[optimizer.partition(",")[0]] in reported, (name, optimizer)
        assert "use optimizer=adamw" in reported, (name, optimizer)
        assert "ddp" in reported, (name, optimizer)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "hsdp", "zero1", "zero3"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon", "schedule_free", "adamw_8bit"])
@pytest.mark.parametrize("adapter", [False, True])
def test_refused_by_name(name, optimizer, adapter):
    """What `wrap` would refuse is refused by the optimizer's name before there is a model, and nothing else is."""
    zero = name.startswith("zero")
    if zero and optimizer == "adamw":
        return  # `test_zero` trains with it
    wrong = zero or (name in ("fsdp2", "hsdp") and optimizer == "adafactor" and not adapter)
    settings = forge_dist.StrategySettings(strategy=name, shard_size=2 if name == "hsdp" else None)
    try:
        forge_dist.make_strategy(settings, Some(4), device=CPU, adapter=adapter, optimizer=optimizer)
        reported = ""
    except StrategyError as error:
        reported = str(error)
    assert bool(reported) == wrong
    assert not wrong or f"optimizer={optimizer}" in reported


def test_one_rank_divides_nothing():
    """fsdp2 on one rank is one process: every optimizer works."""
    settings = forge_dist.StrategySettings(strategy="fsdp2")
    assert forge_dist.make_strategy(settings, Some(1), device=CPU, adapter=False, optimizer="adafactor").name == "fsdp2"
