"""Mixtures of experts from end to end: expert matrices under LoRA, OSFT and Muon, on any ranks, exported and resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import forge_algos
import forge_dist
from forge.reports.osft._inspect import inspect
from forge_dist.exporting._plain import plain_tensors

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import metrics
from .test_osft_divided import CPU, Rows, numbers
from .tiny import _SHAPE
from .verbs import run_verb, settings_of

WAYS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": "lora", "lora_r": 4, "learning_rate": 1e-2},
    "osft": {"adapter": "osft", "unfreeze_rank_ratio": 0.5, "learning_rate": 1e-2},
    "osft paper": {"adapter": "osft", "osft_rule": "paper", "unfreeze_rank_ratio": 0.5, "learning_rate": 2e-3},
    "muon": {"optimizer": "muon", "learning_rate": 2e-3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """Directory of a tiny Qwen3-MoE; its files hold expert matrices one by one."""
    return mixture(tmp_path_factory.mktemp("mixture"), model_dir, 24)


def mixture(folder: Path, model_dir: Path, size: int) -> Path:
    """Write a tiny Qwen3-MoE with experts of a size."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    shape = {**_SHAPE, "vocab_size": len(tokenizer)}
    config = Qwen3MoeConfig(**shape, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=size, router_aux_loss_coef=0.0)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def given(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every run of this file is given."""
    return {
        **settings_of("sft", model, tmp_path_factory.mktemp("rows")),
        "max_steps": 4,
        "effective_batch_size": 6,
        "lr_scheduler": "constant",
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
    }


def figures(run: Path, name: str = "loss") -> list[float]:
    """One figure of every line that has it."""
    return [line[name] for line in metrics(run) if name in line]


def trained(ranks: Any, strategy_name: str, path: str, way: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, the model's tensors as exported or its adapter's) after two steps."""
    settings = dict(WAYS[way])
    rate, optimizer = settings.pop("learning_rate"), settings.pop("optimizer", "adamw")
    how = forge_algos.AdapterSettings(**settings)
    strategy = forge_dist.make_strategy(
        forge_dist.StrategySettings(strategy=strategy_name), ranks, device=CPU, adapter=way == "lora", optimizer=optimizer
    )
    base = strategy.load(path, dtype=torch.float32)
    strategy.settle(base)
    torch.manual_seed(5)
    adaptation = forge_algos.adapt(base, how, ranks=ranks)
    config = forge_algos.OptimizerSettings(learning_rate=rate, optimizer=optimizer, weight_decay=0.1)
    model, moved_by = strategy.wrap(adaptation.model, lambda model: forge_algos.make_optimizer(model, config))
    data = [[row[ranks.rank :: ranks.world_size] for row in numbers(step)] for step in range(2)]
    outputs = forge_algos.train(
        model,
        data,
        objective=Rows(),
        optimizer=moved_by,
        scheduler=forge_algos.schedule(moved_by, config, len(data)),
        max_grad_norm=0.5,
        parallel=strategy,
        adaptation=adaptation,
    )
    losses = [output.loss for output in outputs]
    state = strategy.whole(model)
    if way == "lora":
        return losses, {name: tensor.clone() for name, tensor in state if tensor is not None and "lora_" in name}
    tensors = plain_tensors(base, state, adaptation.plain, adaptation.additions)
    return losses, {name: tensor.clone() for name, tensor in tensors if tensor is not None}


def scenario(ranks: Any, path: str, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Train several ways under several strategies."""
    return {pair: trained(ranks, pair[0], path, pair[1]) for pair in pairs}


@pytest.mark.slow
def test_any_ranks_train_experts_alike(model: Path) -> None:
    """One process and two ranks of fsdp2, which divides five experts unevenly: the same losses and weights."""
    with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings(), environ={})) as ranks:
        one = scenario(ranks, str(model), [("single", way) for way in WAYS])
    pairs = [("fsdp2", way) for way in WAYS]
    for (name, way), (losses, tensors) in run_on_ranks(scenario, 2, str(model), pairs)[0].items():
        expected_losses, expected = one["single", way]
        # Muon computes in bfloat16, whose sums in another order are other numbers.
        close = 5e-3 if way == "muon" else 1e-4
        assert losses == pytest.approx(expected_losses, rel=1e-3 if way == "muon" else 1e-5), (name, way)
        assert any("experts" in key for key in tensors)
        assert tensors.keys() <= expected.keys()
        for key, tensor in tensors.items():
            assert (tensor - expected[key]).abs().max() < close, (name, way, key)


@pytest.mark.slow
@pytest.mark.parametrize("way", ci_keeps(["lora"], ["lora", "osft"]))
def test_a_run_packs_resumes_and_exports_experts(way: str, given: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """Packed as alone, resumed to the bit, and what was exported loads without forge and has moved experts."""
    settings = {**given, **WAYS[way], "full_state_every_steps": 2}
    whole = run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "whole")})
    assert figures(tmp_path / "whole", "eval_loss")[-1] < figures(tmp_path / "whole", "eval_loss")[0]
    run_verb("sft", {**settings, "max_steps": 2, "ckpt_output_dir": str(tmp_path / "halves")})
    again = run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "halves")})
    file = "adapter_model.safetensors" if way == "lora" else "model.safetensors"
    ours, theirs = load_file(Path(again["model_dir"]) / file), load_file(Path(whole["model_dir"]) / file)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    if way == "lora":
        run_verb("sft", {**settings, "packing": "off", "ckpt_output_dir": str(tmp_path / "off")})
        np.testing.assert_allclose(figures(tmp_path / "off"), figures(tmp_path / "whole"), rtol=1e-5)
    kind: Any = AutoPeftModelForCausalLM if way == "lora" else AutoModelForCausalLM
    loaded = kind.from_pretrained(whole["model_dir"])
    loaded = loaded.merge_and_unload() if way == "lora" else loaded
    base = AutoModelForCausalLM.from_pretrained(model)
    for (name, tensor), before in zip(loaded.state_dict().items(), base.state_dict().values(), strict=True):
        assert torch.equal(tensor, before) == ("_proj" not in name), name
    log = (tmp_path / "whole" / "log.txt").read_text()
    assert re.search(r"  experts    [\d,]+ of [\d,]+ \(", log)
    if way == "osft":
        summary = inspect(tmp_path / "whole")
        assert "so nothing leaked" in summary
        # Of 4 stacks of 5 matrices and 8 linear layers.
        assert "directions of 12 targets" in summary
        page = (tmp_path / "whole" / "osft" / "inspect.html").read_text()
        assert "5 × 48 × 32" in page


def test_experts_of_any_size_train(given: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    """Rows that no grouped product takes; the run was refused as one whose model cannot run a packed row."""
    path = mixture(tmp_path / "mixture", model_dir, 6)
    run_verb("sft", {**given, "model_path": str(path), "max_steps": 1, "ckpt_output_dir": str(tmp_path / "run")})
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(r"experts: one after the other: .* multiples of 8, and model\.layers\.0\.mlp\.experts\.\w+ is \[5, ", log)
    assert "packing: on" in log


@pytest.mark.slow
def test_experts_are_switched_off_for_a_reference(model: Path, tmp_path: Path) -> None:
    """DPO with the base under the adapter as its reference: its first loss is log 2, and adapters on experts learn."""
    settings = {
        **settings_of("dpo", model, tmp_path),
        **WAYS["lora"],
        "target_modules": ("experts",),
        "reference": "adapter_off",
        "ckpt_output_dir": str(tmp_path / "run"),
    }
    run_verb("dpo", settings)
    losses = figures(tmp_path / "run")
    assert losses[0] == pytest.approx(0.6931472, abs=1e-5)
    assert losses[-1] < losses[0] - 0.01
    written = json.loads(next((tmp_path / "run" / "hf_format").glob("*/adapter_config.json")).read_text())
    assert written["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert written["target_modules"] == []


@pytest.mark.lane
@pytest.mark.slow
def test_experts_alone_train_under_zero3(given: dict[str, Any], tmp_path: Path) -> None:
    """Nothing below them has a gradient, and DeepSpeed's leaf modules are blocks of experts: the losses of one process."""
    settings = {**given, "unfrozen_parameters": ("model.layers.1.mlp.experts.down_proj",), "learning_rate": 1e-2}
    run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "one")})
    two = {**settings, "strategy": "zero3", "ckpt_output_dir": str(tmp_path / "two")}
    run_on_ranks(run_verb, 2, "sft", two, joined=False)
    np.testing.assert_allclose(figures(tmp_path / "two"), figures(tmp_path / "one"), rtol=1e-5)
