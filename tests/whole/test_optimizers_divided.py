"""forge_algos' optimizers on forge_dist's strategies: exact full states, or refused by name."""

from __future__ import annotations

import importlib.util
import typing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import forge_algos
import forge_dist

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import tiny

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

OPTIMIZERS = typing.get_args(typing.get_type_hints(forge_algos.OptimizerSettings)["optimizer"])
EXTRAS = {"schedule_free": "schedulefree", "adamw_8bit": "bitsandbytes"}
HERE = [name for name in OPTIMIZERS if name not in EXTRAS or importlib.util.find_spec(EXTRAS[name]) is not None]
NOT_DIVIDED = ("adafactor",)
CPU = torch.device("cpu")


class Kept(dict[str, torch.Tensor]):
    """A full state in memory, whole."""

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What `load_state` asks for."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.items()}

    def read(self, into: dict[str, torch.Tensor]) -> None:
        """Fill tensors and DTensors in place."""
        for name, tensor in into.items():
            local = self[name]
            if isinstance(tensor, DTensor):
                local = torch.distributed.tensor.distribute_tensor(
                    local, tensor.device_mesh, tensor.placements, src_data_rank=None
                )
            tensor.copy_(local)


def kept(state: dict[str, torch.Tensor]) -> Kept:
    return Kept({n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in state.items()})


def start(ranks: Any, strategy_name: str, path: str, optimizer: str) -> tuple[Any, Any, Any]:
    settings = forge_dist.StrategySettings(strategy=strategy_name)
    strategy = forge_dist.make_strategy(settings, ranks, device=CPU, adapter=False, optimizer=optimizer)
    given = {"lr_scheduler": "constant"} if optimizer == "schedule_free" else {}
    how = forge_algos.OptimizerSettings(optimizer=optimizer, learning_rate=1e-2, **given)
    model = strategy.load(path, dtype=torch.float32)
    return strategy, *strategy.wrap(model, lambda model: forge_algos.make_optimizer(model, how))


def steps(strategy: Any, model: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        if hasattr(optimizer, "train"):
            optimizer.train()
        strategy.zero_grad(optimizer)
        ids = torch.randint(0, 60, (2, 6), generator=torch.Generator().manual_seed(number))
        mine = ids[strategy.ranks.rank :: strategy.world_size]
        with strategy.micro_batch(last=True):
            strategy.backward(model(input_ids=mine, labels=mine, use_cache=False).loss * len(mine) / 2)
        strategy.step(optimizer)
        if hasattr(optimizer, "eval"):
            optimizer.eval()


def scenario(ranks: Any, path: str, names: list[str], states: dict[str, Kept]) -> dict[tuple[str, str], Any]:
    """(strategy, optimizer) → states after two and three steps; a loaded state, own or other, and one step later."""
    found: dict[tuple[str, str], Any] = {}
    for name in names:
        for optimizer in HERE:
            try:
                strategy, model, made = start(ranks, name, path, optimizer)
            except forge_dist.StrategyError as error:
                found[name, optimizer] = str(error)
                continue
            steps(strategy, model, made, range(2))
            saved = kept(strategy.state(model, made))
            steps(strategy, model, made, range(2, 3))
            later = kept(strategy.state(model, made))
            arrived = {}
            for key, state in {"own": saved, "other": states.get(optimizer, saved)}.items():
                strategy, model, made = start(ranks, name, path, optimizer)
                strategy.load_state(model, made, state)
                again = kept(strategy.state(model, made))
                steps(strategy, model, made, range(2, 3))
                arrived[key] = again, kept(strategy.state(model, made))
            found[name, optimizer] = saved, later, arrived
    return found


def same(first: Kept, second: Kept) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("names", ci_keeps(["fsdp2"], ["fsdp2", "ddp zero1 zero3"]))
def test_every_pair(names: str, tmp_path: Path) -> None:
    """On as many ranks the same bits; on another number the state arrives bit for bit; or the optimizer is refused."""
    path = tiny.save("llama-untied", tmp_path / "model")
    with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings(), environ={})) as ranks:
        one = scenario(ranks, path, ["single"], {})
    states = {optimizer: found[0] for (_, optimizer), found in one.items()}
    here = [name for name in names.split() if "zero" not in name or importlib.util.find_spec("deepspeed")]
    two = run_on_ranks(scenario, 2, path, here, states)[0]
    refused = {pair for pair, found in two.items() if isinstance(found, str)}
    wanted = {
        (name, o) for name, o in two if (name.startswith("zero") and o != "adamw") or (name == "fsdp2" and o in NOT_DIVIDED)
    }
    assert refused == wanted
    assert all(f"optimizer={optimizer}" in two[name, optimizer] for name, optimizer in refused)
    for (name, optimizer), (saved, later, arrived) in {**one, **{p: f for p, f in two.items() if p not in refused}}.items():
        assert same(arrived["own"][0], saved), (name, optimizer)
        assert same(arrived["own"][1], later), (name, optimizer)
        assert same(arrived["other"][0], states[optimizer]), (name, optimizer)
        # Muon computes in bfloat16, whose sums in another order are other numbers.
        close = 5e-3 if optimizer == "muon" else 1e-4
        for key in (key for key in saved if key.startswith("model/")):
            assert (saved[key] - states[optimizer][key]).abs().max() < close, (name, optimizer, key)


def wide(folder: Path) -> str:
    """A model whose matrices have moments in 8 bits, with rows of 256 and of 300 numbers, and an odd number of rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 300, "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 30}
    LlamaForCausalLM(LlamaConfig(vocab_size=63, num_hidden_layers=1, **sizes)).save_pretrained(folder)
    return str(folder)


def given_gradients(model: Any, step: int) -> None:
    """Give every parameter a made-up gradient, the same whole one on any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        held = parameter.detach()
        if isinstance(held, DTensor):
            gradient = torch.distributed.tensor.distribute_tensor(
                gradient, held.device_mesh, held.placements, src_data_rank=None
            )
        parameter.grad = gradient


def eight_bits(ranks: Any, strategy_name: str, path: str, states: dict[str, Kept]) -> dict[str, tuple[Kept, Kept]]:
    """Dtype of the weights → the state after two steps from the file, and after one more from `states`."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        settings = forge_dist.StrategySettings(strategy=strategy_name)
        strategy = forge_dist.make_strategy(settings, ranks, device=CPU, adapter=False, optimizer="adamw_8bit")
        how = forge_algos.OptimizerSettings(optimizer="adamw_8bit", learning_rate=1e-2, weight_decay=0.1)

        def started(strategy: Any = strategy, dtype: Any = dtype, how: Any = how) -> tuple[Any, Any]:
            model = strategy.load(path, dtype=dtype)
            return strategy.wrap(model, lambda model: forge_algos.make_optimizer(model, how, seed=5))

        model, made = started()
        for step in range(2):
            given_gradients(model, step)
            strategy.step(made)
        saved = kept(strategy.state(model, made))
        model, made = started()
        strategy.load_state(model, made, states.get(str(dtype), saved))
        given_gradients(model, 2)
        strategy.step(made)
        found[str(dtype)] = saved, kept(strategy.state(model, made))
    return found


def test_moments_in_8_bits_on_any_ranks(tmp_path: Path) -> None:
    """Given the same gradients, one rank and two have the same bits: weights, codes and scales; a state goes on on either.

    Weights in bfloat16 too, which are rounded at random.
    """
    pytest.importorskip("bitsandbytes")
    path = wide(tmp_path / "model")
    with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings(), environ={})) as ranks:
        one = eight_bits(ranks, "single", path, {})
    two = run_on_ranks(eight_bits, 2, "fsdp2", path, {dtype: saved for dtype, (saved, _) in one.items()})[0]
    for dtype, (saved, later) in one.items():
        name = "optimizer/model.layers.0.mlp.down_proj.weight"
        assert saved[f"{name}/state1"].dtype == torch.uint8
        assert saved[f"{name}/absmax1"].shape == (300, 1)
        assert saved["optimizer/model.layers.0.mlp.up_proj.weight/absmax2"].shape == (256, 2)
        assert saved["model/model.norm.weight"].dtype == getattr(torch, dtype.removeprefix("torch."))
        assert same(two[dtype][0], saved), dtype
        assert same(two[dtype][1], later), dtype
        assert not same(saved, later), dtype


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_name_is_known(optimizer: str) -> None:
    """What forge_algos calls an optimizer is what forge_dist refuses or lets pass: under ZeRO all but adamw."""

    class Two:
        rank, local_rank, world_size, local_world_size, is_first, group = 0, 0, 2, 2, True, None

    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs the extra deepspeed")
    settings = forge_dist.StrategySettings(strategy="zero2")
    if optimizer == "adamw":
        return
    with pytest.raises(forge_dist.StrategyError, match=f"optimizer={optimizer}"):
        forge_dist.make_strategy(settings, Two(), device=CPU, adapter=False, optimizer=optimizer)
