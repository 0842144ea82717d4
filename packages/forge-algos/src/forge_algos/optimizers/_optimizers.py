"""Optimizer of a model's trainable parameters, in groups of which only matrices decay."""

from importlib import import_module
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._errors import MissingPackageError, OptimizerError
from forge_algos._modules import trainable, unwrap
from forge_algos.optimizers._adamw_8bit import AdamW8bit
from forge_algos.optimizers._apollo import Apollo
from forge_algos.optimizers._closure import Combined
from forge_algos.optimizers._muon import MuonAdamW, muon_matrices
from forge_algos.optimizers._muon_stacks import muon_stacks
from forge_algos.optimizers._vectors import vectors
from forge_algos.settings._adapter_table import ADAPTERS, Adapter
from forge_algos.settings._optimizer import ADAFACTOR_SCALE, OptimizerSettings


def make_optimizer(
    model: nn.Module, settings: OptimizerSettings, *, fused: bool = False, seed: int = 0
) -> torch.optim.Optimizer:
    """Make the optimizer that `settings.optimizer` names, over the parameters that train.

    With `loraplus_lr_ratio` LoRA's B matrices are groups of their own, whose rate is that multiple of the others'.

    Matrices (two dimensions or more) decay by `weight_decay`, norms, biases and what adapters have as vectors (ia3's
    factors, the angles of oft) do not; embeddings are matrices.

    - adamw: torch.optim.AdamW. With lr the scheduled rate: p ← p - lr · weight_decay · p, then p ← p - lr · m̂ / (√v̂ + eps).
    - adafactor: torch.optim.Adafactor, whose state is a row and a column of each matrix. Its step is the rate times the root
      mean square of the matrix, at least 1/50 for one that begins at zero (LoRA's B, OSFT's direct form): there the default
      rate makes steps of the size of AdamW's, where torch's floor of 1/1000 would leave it nearly where it is.
    - muon: `MuonAdamW`. torch.optim.Muon on the matrices of the numbered layers, each expert's by itself, with its steps scaled
      to the size of AdamW's (arXiv 2502.16982), so that one rate serves both; torch.optim.AdamW on embeddings, heads, norms,
      biases and all else.
    - schedule_free: schedulefree's AdamWScheduleFree. `train` keeps it in its training mode during a step only.
    - adamw_8bit: `AdamW8bit`, bitsandbytes' kernels over rows, which ranks may divide; parameters of less than 4,096 numbers,
      or with rows of less than 256, keep 32 bits. bfloat16 weights are rounded stochastically.
    - apollo, apollo_mini: `Apollo` on the matrices of the numbered layers, each expert's by itself: gradients scaled by factors
      of a low-rank state, by default to about the size of AdamW's steps; torch.optim.AdamW on all else. Not with an adapter.

    Args:
        model: its parameters that need a gradient are trained.
        settings: where no learning rate is set, that of the PEFT adapter that the model carries, if any, and of the optimizer.
            Whatever adapts a model, `settings.resolve(adapter)` has its rate.
        fused: torch's AdamW as one kernel a dtype instead of several passes over memory; True where the device has it.
        seed: of the random bits of stochastic rounding and of APOLLO's projections, which follow from it, from the step and
            from a number's place.

    Raises:
        MissingPackageError: schedulefree or bitsandbytes is not installed.
        OptimizerError: bitsandbytes does not serve the parameters' device; nothing that is trained is Muon's or APOLLO's, or
            nothing is left for AdamW, whose settings were given; APOLLO with an adapter; loraplus_lr_ratio without LoRA's
            matrices.
    """
    if not isinstance(settings, OptimizerSettings):
        raise OptimizerError(f"OptimizerSettings(optimizer='adamw', ...) are wanted, not {settings!r}")
    adapter = _adapter(model)
    settings = settings.resolve(adapter)
    if settings.loraplus_lr_ratio != 1 and not _second_factors(model):
        raise OptimizerError(
            f"loraplus_lr_ratio={settings.loraplus_lr_ratio} has no effect: no matrix B of a LoRA trains here; leave it out, "
            "or set adapter=lora"
        )
    common: dict[str, Any] = {"lr": settings.learning_rate}
    adam: dict[str, Any] = {**common, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if settings.optimizer == "muon":
        return _muon(model, settings, adam, fused=fused)
    if settings.low_rank:
        if adapter != "none":
            raise OptimizerError(
                f"optimizer={settings.optimizer} keeps a low-rank state of whole matrices, and here an adapter trains "
                f"({adapter}): use optimizer=adamw, or adapter=none"
            )
        return _apollo(model, settings, {**adam, "fused": fused}, seed)
    groups = _groups(model, trainable(model), settings)
    if settings.optimizer == "adafactor":
        return torch.optim.Adafactor(_with_floor(model, groups), **common)
    if settings.optimizer == "schedule_free":
        return _schedule_free(groups, adam)
    if settings.optimizer == "adamw_8bit":
        # Numbered by the model, whose order is the same however it is divided.
        return AdamW8bit(groups, **adam, seed=seed, numbers={p: number for number, p in enumerate(trainable(model))})
    return torch.optim.AdamW(groups, **adam, fused=fused)


def adamw(model: nn.Module, settings: OptimizerSettings, *, fused: bool = False) -> torch.optim.AdamW:
    """Make the default optimizer (adamw), as `make_optimizer` does.

    Raises:
        ValueError: the settings name another optimizer.
    """
    if settings.optimizer != "adamw":
        raise ValueError(f"adamw was called with optimizer={settings.optimizer!r}; make_optimizer makes that one")
    made = make_optimizer(model, settings, fused=fused)
    assert isinstance(made, torch.optim.AdamW)
    return made


def cast_trained(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters that train to a dtype, in place.

    In bfloat16 only optimizer=adamw_8bit moves them as it should, by stochastic rounding.

    Args:
        model: with its adapter; before an optimizer is made and before it is divided over ranks, unless it was loaded so.
        dtype: float32 or bfloat16.
    """
    for parameter in trainable(model):
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.detach().to(dtype)


def _adapter(model: nn.Module) -> Adapter:
    """Return the adapter that a model carries, by PEFT's configuration or its added modules.

    The adapters of LoRA's family share PEFT's configuration and a default rate; any other of PEFT's counts as one of them.
    """
    carried = {type(config).__name__ for config in getattr(unwrap(model), "peft_config", {}).values()}
    modules = {name.rpartition(".")[2] for name, _ in model.named_modules()} - {""}
    found = [name for name, kind in ADAPTERS.items() if kind.peft in carried or kind.child in modules]
    return found[0] if found else "lora" if carried else "none"


def _second_factors(model: nn.Module) -> set[int]:
    """Return the ids of LoRA's B matrices that train."""
    return {id(p) for name, p in model.named_parameters() if p.requires_grad and "lora_B" in name.split(".")}


def _groups(model: nn.Module, parameters: list[nn.Parameter], settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Group matrices apart from what does not decay, and shards apart from whole tensors.
    A fused kernel takes shards or whole tensors, not both.
    """
    kinds = dict.fromkeys(type(p.detach()) for p in parameters)
    excluded = vectors(model)
    matrices = {id(p) for p in parameters if p.dim() >= 2 and id(p) not in excluded}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if (id(p) in matrices) == matrix and type(p.detach()) is kind], "weight_decay": decay}
        for kind in kinds
        for matrix, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    return _with_ratio(model, [group for group in groups if group["params"]], settings)


def _with_ratio(model: nn.Module, groups: list[dict[str, Any]], settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Give LoRA's B matrices groups of their own, with their rate (LoRA+); after the others."""
    if settings.loraplus_lr_ratio == 1:
        return groups
    return _apart(groups, _second_factors(model), {"lr": (settings.learning_rate or 0.0) * settings.loraplus_lr_ratio})


def _with_floor(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group matrices that begin at zero with a higher floor of Adafactor's scale.

    They are known by their names and not by their values, which differ when a run is resumed or divided.
    """
    osft, named = ADAPTERS["osft"].child, {name for kind in ADAPTERS.values() for name in kind.zero}
    parts = {id(p): name.split(".") for name, p in model.named_parameters() if p.requires_grad}
    zero = {found for found, name in parts.items() if (osft in name and name[-1] == "weight") or not named.isdisjoint(name)}
    return _apart(groups, zero | _second_factors(model), {"eps": (None, 1 / ADAFACTOR_SCALE)})


def _apart(groups: list[dict[str, Any]], ids: set[int], more: dict[str, Any]) -> list[dict[str, Any]]:
    """Move parameters with these ids to groups of their own with other options, the last."""
    others = [{**group, "params": [p for p in group["params"] if id(p) not in ids]} for group in groups]
    own = [{**group, **more, "params": [p for p in group["params"] if id(p) in ids]} for group in groups]
    return [group for group in (*others, *own) if group["params"]]


def _muon(model: nn.Module, settings: OptimizerSettings, adam: dict[str, Any], *, fused: bool) -> MuonAdamW:
    chosen, stacks = muon_matrices(model), muon_stacks(model)
    ids = {id(p) for p in [*chosen, *(p for stack in stacks for p in stack["params"])]}
    rest = [p for p in trainable(model) if id(p) not in ids]
    if not ids:
        raise OptimizerError("optimizer=muon: no numbered layer of the model has a matrix that is trained; use optimizer=adamw")
    for name in ("beta1", "beta2", "eps"):
        if not rest and getattr(settings, name) != getattr(attrs.fields(OptimizerSettings), name).default:
            raise OptimizerError(
                f"{name}={getattr(settings, name)!r} has no effect: all that is trained are matrices of layers, which are "
                "Muon's, and nothing is left for AdamW; leave it out"
            )
    muon = {"lr": settings.learning_rate, "momentum": settings.momentum, "weight_decay": settings.weight_decay}
    matrices = _with_ratio(model, [{"params": chosen}] if chosen else [], settings)
    stacks = _with_ratio(model, stacks, settings)
    return MuonAdamW(matrices, stacks, _groups(model, rest, settings), muon=muon, adamw={**adam, "fused": fused})


def _apollo(model: nn.Module, settings: OptimizerSettings, adam: dict[str, Any], seed: int) -> Combined:
    # Without adapters every stack has the same layout.
    chosen = [*muon_matrices(model), *(p for stack in muon_stacks(model) for p in stack["params"])]
    if not chosen:
        raise OptimizerError(
            f"optimizer={settings.optimizer}: no numbered layer of the model has a matrix that is trained; use optimizer=adamw"
        )
    mini = settings.optimizer == "apollo_mini"
    apollo = Apollo(
        [{"params": chosen}],
        lr=adam["lr"],
        betas=adam["betas"],
        eps=adam["eps"],
        weight_decay=settings.weight_decay,
        rank=1 if mini and settings.apollo_rank is None else settings.apollo_rank,
        update_interval=settings.apollo_update_interval,
        scale=settings.apollo_scale,
        scale_type="tensor" if mini else "channel",
        seed=seed,
        # Numbered by the model, whose order is the same however it is divided.
        numbers={p: number for number, p in enumerate(trainable(model))},
    )
    ids = {id(p) for p in chosen}
    parts: list[tuple[str, torch.optim.Optimizer]] = [("apollo", apollo)]
    if rest := [p for p in trainable(model) if id(p) not in ids]:
        parts.append(("adamw", torch.optim.AdamW(_groups(model, rest, settings), **adam)))
    return Combined(parts)


def _schedule_free(groups: list[dict[str, Any]], adam: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        made = import_module("schedulefree").AdamWScheduleFree
    except ImportError as error:
        raise MissingPackageError(
            "optimizer=schedule_free needs schedulefree: `pip install 'forge-algos[schedulefree]'`, or use optimizer=adamw"
        ) from error
    return made(groups, **adam)
