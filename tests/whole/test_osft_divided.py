"""forge_algos' OSFT on forge_dist's strategies: the same exported model, the same protected directions."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forge_algos
import forge_dist
from forge_dist.exporting._plain import plain_tensors

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import tiny

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
RULES: dict[str, dict[str, Any]] = {"direct": {}, "factors": {"osft_form": "factors"}, "paper": {"osft_rule": "paper"}}
ZERO = ["zero1", "zero3"] if importlib.util.find_spec("deepspeed") else []


def moved(ranks: Any, strategy_name: str, path: str, rule: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[float]]:
    """(plain tensors, plan, gradient norms) after three steps of AdamW with weight decay and clipping."""
    settings = forge_dist.StrategySettings(strategy=strategy_name)
    strategy = forge_dist.make_strategy(settings, ranks, device=CPU, adapter=False, optimizer="adamw")
    base = strategy.load(path, dtype=torch.float32)
    how = forge_algos.AdapterSettings(adapter="osft", unfreeze_rank_ratio=0.5, osft_train_rest=("norms",), **RULES[rule])
    adaptation = forge_algos.adapt(base, how, ranks=ranks)
    config = forge_algos.OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, eps=1e-3)
    model, optimizer = strategy.wrap(adaptation.model, lambda model: forge_algos.make_optimizer(model, config))
    data = [[row[ranks.rank :: ranks.world_size] for row in numbers(step)] for step in range(3)]
    outputs = forge_algos.train(
        model,
        data,
        objective=Rows(),
        optimizer=optimizer,
        scheduler=forge_algos.schedule(optimizer, config, len(data)),
        max_grad_norm=0.5,
        parallel=strategy,
        adaptation=adaptation,
    )
    norms = [output.grad_norm for output in outputs]
    tensors = plain_tensors(base, strategy.whole(model), adaptation.plain, adaptation.additions)
    kept = {name: tensor.clone() for name, tensor in tensors if tensor is not None}
    return kept, adaptation.plan, norms


def numbers(step: int) -> list[torch.Tensor]:
    """Two micro-batches of two rows."""
    return list(torch.randint(3, 60, (2, 2, 7), generator=torch.Generator().manual_seed(step)))


class Rows:
    """Objective on unpacked rows of one length."""

    unit = "tokens"
    stats = ()

    def count(self, batch: torch.Tensor) -> int:
        return batch[:, 1:].numel()

    def samples(self, batch: torch.Tensor) -> int:
        return len(batch)

    def tokens(self, batch: torch.Tensor) -> int:
        return batch.numel()

    def idle(self) -> torch.Tensor:
        return torch.zeros(1, 2, dtype=torch.int64)

    def figures(self, sums: dict[str, float], count: int) -> dict[str, float]:
        return {}

    def bind(self, model: torch.nn.Module, *, device: torch.device) -> Any:
        def loss(batch: torch.Tensor, totals: list[float]) -> forge_algos.LossTerms:
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            terms = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            return forge_algos.LossTerms(terms, self.count(batch), {})

        loss.needs = 0  # type: ignore[attr-defined]
        return loss


def scenario(ranks: Any, path: str, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    return {pair: moved(ranks, pair[0], path, pair[1]) for pair in pairs}


@pytest.mark.parametrize("names", ci_keeps([["ddp", "fsdp2"]], [["ddp", "fsdp2"], ZERO]), ids=["torch", "deepspeed"])
def test_the_same_model_comes_out_of_two_ranks(names: list[str], tmp_path: Path) -> None:
    """Weights, gradient norms and singular vectors are those of one process; protected directions stay."""
    if not names:
        pytest.skip("needs the extra deepspeed")
    path = tiny.save("llama-tied", tmp_path / "model")
    with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings(), environ={})) as ranks:
        one = scenario(ranks, path, [("single", rule) for rule in RULES])
    # DeepSpeed moves flat partitions, in which nothing can be projected.
    pairs = [(name, rule) for name in names for rule in RULES if rule == "direct" or name not in ZERO]
    two = run_on_ranks(scenario, 2, path, pairs)
    start = {name: tensor.double() for name, tensor in tiny.plain(path).state_dict().items()}
    for (name, rule), (tensors, plan, norms) in two[0].items():
        expected, expected_plan, expected_norms = one["single", rule]
        assert plan == expected_plan == two[1][name, rule][1], (name, rule)
        assert norms == pytest.approx(expected_norms, rel=1e-4), (name, rule)
        assert tensors.keys() <= expected.keys()
        for key, tensor in tensors.items():
            assert (tensor - expected[key]).abs().max() < 1e-5, (name, rule, key)
        for target, entry in plan.items():
            move, before = tensors[f"{target}.weight"].double() - start[f"{target}.weight"], start[f"{target}.weight"]
            U, _, Vh = torch.linalg.svd(before, full_matrices=False)
            k = entry["protected"]
            on = [U[:, :k].T @ move @ Vh[:k].T] if rule == "paper" else [U[:, :k].T @ move, move @ Vh[:k].T]
            # Of the weights' own rounding there is that much in what they differ by.
            assert all(float(part.norm()) < 1e-6 * float(before.norm()) for part in on), (name, rule, target)
            assert float(move.norm()) > 1e-3 * float(before.norm())
