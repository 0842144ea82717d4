"""Losses of a rank's own rows, and their whole gradients: what test_scored_over_ranks.py runs on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

CPU = torch.device("cpu")
LENGTHS = ((5, 8), (11,))
"""Documents of each rank's row."""


class Scenario(NamedTuple):
    """A model, its adapter and heads, and the losses to compute."""

    path: str
    losses: tuple[str, ...]
    task: str = "causal"
    lora: bool = False
    valued: bool = False
    teacher: str = ""


class Asked(NamedTuple):
    """What a loss is computed with: the model's head, its frozen teacher's, and the rank's row."""

    head: Any
    teacher: Any
    inputs: dict[str, Any]
    rows: torch.Tensor
    targets: torch.Tensor
    rank: int

    def valued(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities, every position's value)"""
        from forge_algos.heads._value_head import values_at

        every = torch.arange(self.inputs["input_ids"].numel())
        return self.head.logps(*self[2:5], beside=lambda hidden: values_at(self.head.model, hidden, every))


def bent(logps: torch.Tensor) -> torch.Tensor:
    """A loss in which each log-probability has a gradient of its own."""
    return torch.nn.functional.softplus(-logps / 3).square().sum()


def nll(asked: Asked) -> torch.Tensor:
    return asked.head.nll(*asked[2:5], dft=True, label_smoothing=0.1, z_loss=0.01).sum


def logps(asked: Asked) -> torch.Tensor:
    return bent(asked.head.logps(*asked[2:5], temperature=0.7))


def entropy(asked: Asked) -> torch.Tensor:
    logps, entropy = asked.head.logps_and_entropy(*asked[2:5])
    return (logps * entropy).sum()


def logps_of_one_rank(asked: Asked) -> torch.Tensor:
    """The other rank takes part with no row to score."""
    learned = len(asked.rows) * (1 - asked.rank)
    return bent(asked.head.logps(asked.inputs, asked.rows[:learned], asked.targets[:learned]))


def beside(asked: Asked) -> torch.Tensor:
    found, values = asked.valued()
    return bent(found) + values.square().sum()


def values_alone(asked: Asked) -> torch.Tensor:
    """The loss does not depend on the log-probabilities."""
    return asked.valued()[1].square().sum()


def taught(asked: Asked) -> torch.Tensor:
    return asked.head.distillation(asked.inputs, asked.rows, asked.teacher, asked.inputs, beta=0.3, temperature=1.5).sum


def scores(asked: Asked) -> torch.Tensor:
    return bent(asked.head.scores(asked.inputs, asked.rows))


LOSSES: dict[str, Callable[[Asked], torch.Tensor]] = {
    f.__name__: f for f in (nll, logps, entropy, logps_of_one_rank, beside, values_alone, taught, scores)
}


def row_of(rank: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """(forward arguments, rows, targets) of this rank; one position is scored twice, as before two completions."""
    from forge_algos.batches._packed import packed_inputs

    lengths = LENGTHS[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 131, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    inputs = packed_inputs(ids, positions, torch.tensor([0, *lengths]).cumsum(0), max(lengths))
    rows = torch.tensor([1, 2, 2, 4])[: 4 - rank]
    return inputs, rows, torch.randint(3, 131, (len(rows),), generator=generator)


def prepared(strategy: Any, scenario: Scenario) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The scenario's model by `strategy`, with an adapter and a value head where it has them, and its optimizer."""
    import forge_algos

    model = strategy.load(scenario.path, dtype=torch.float32, attention="sdpa", task=scenario.task)
    generator = torch.Generator().manual_seed(7)
    if scenario.lora:
        strategy.settle(model)
        model = forge_algos.adapt(model, forge_algos.AdapterSettings(adapter="lora", lora_r=3)).model
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    if scenario.valued:
        linear = forge_algos.online.attach_value_head(model)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator))
            linear.bias.fill_(0.5)
    return strategy.wrap(model, lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3))


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name → gradient as one process would have it, gathered from its parts."""
    from torch.distributed.tensor import DTensor

    from forge_algos._modules import unwrap
    from forge_dist.strategies._wrappers import resharded

    found = {}
    for name, parameter in resharded(unwrap(model)).named_parameters():
        grad = parameter.grad
        if parameter.requires_grad and (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
            from deepspeed.utils import safe_get_full_grad

            grad = safe_get_full_grad(parameter)
        if grad is not None:
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    return found


def scored(ranks: Any, options: Mapping[str, Any], scenario: Scenario) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """Loss's name → (its sum over all rows, its gradients). One process has both ranks' rows, one after another."""
    import forge_dist
    from forge_algos.objectives import choose_head, choose_scalar_head

    def strategy_of() -> Any:
        settings = forge_dist.StrategySettings(**options)
        return forge_dist.make_strategy(settings, ranks, device=CPU, adapter=scenario.lora)

    strategy = strategy_of()
    torch.manual_seed(1)
    model, optimizer = prepared(strategy, scenario)
    model.train()
    head = (choose_head if scenario.task == "causal" else choose_scalar_head)(model, device=CPU)
    teacher = None
    if scenario.teacher:
        # Where the student is divided the teacher is too; ZeRO divides nothing that no engine drives.
        keeper = strategy_of() if options["strategy"] in ("fsdp2", "single") else None
        load = forge_dist.load_model if keeper is None else keeper.load
        frozen = load(scenario.teacher, dtype=torch.float32, attention="sdpa", **({"device": CPU} if keeper is None else {}))
        teacher = choose_head(frozen.requires_grad_(False).eval(), device=CPU)
    found = {}
    for name in scenario.losses:
        strategy.zero_grad(optimizer)
        mine = [ranks.rank] if ranks.world_size > 1 else [0, 1]
        # Each row twice, so that the weights were gathered and given up before, and gradients are added to gradients.
        turns = [rank for rank in mine for _ in range(2)]
        total = 0.0
        for turn, rank in enumerate(turns):
            with strategy.micro_batch(turn == len(turns) - 1):
                loss = LOSSES[name](Asked(head, teacher, *row_of(rank), rank))
                strategy.backward(loss)
            total += loss.item()
        found[name] = strategy.sum([total])[0], whole_gradients(model)
        strategy.zero_grad(optimizer)
    return found


def all_scored(ranks: Any, options: Mapping[str, Any], scenarios: list[Scenario]) -> list[Any]:
    """Several scenarios in one set of ranks."""
    return [scored(ranks, options, scenario) for scenario in scenarios]
