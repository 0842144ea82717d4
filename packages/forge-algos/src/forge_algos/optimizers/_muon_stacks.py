"""Muon on stacks of matrices, each matrix by itself, for torch.optim.Muon takes single ones."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_algos._errors import OptimizerError
from forge_algos._experts import expert_stacks
from forge_algos.optimizers._closure import OneByOne
from forge_algos.optimizers._divided import local

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPS = 1e-7


def muon_stacks(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups of the trainable stacks of matrices in the numbered layers, by layout.

    `layout` is stack for [E, A, B]: expert matrices, or what OSFT trains of them. LoRA's factors of E experts are one matrix
    each: A [E r, M] has them one below the other (rows), B [N, r E] every E-th column (columns).
    """
    factors = stacked_factors(model)
    stacks = {id(stack.weight) for stack in expert_stacks(model).values()}
    groups: dict[tuple[str, int], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if not parameter.requires_grad or not any(part.isdigit() for part in parts):
            continue
        found = factors.get(parameter)
        if parameter.dim() == 3 and (id(parameter) in stacks or "osft" in parts):
            found = ("stack", len(parameter))
        if found is not None:
            groups.setdefault(found, []).append(parameter)
    return [{"params": params, "layout": layout, "experts": E} for (layout, E), params in groups.items()]


def stacked_factors(model: nn.Module) -> dict[nn.Parameter, tuple[str, int]]:
    """Return LoRA's factors of expert stacks with their layout and the number of experts."""
    return {parameter: (layout, E) for parameter, layout, E in _factors(model)}


def _factors(model: nn.Module) -> Iterator[tuple[nn.Parameter, str, int]]:
    for module in model.modules():
        # PEFT's layer around a parameter [E, N, M]; those around linear layers count no experts.
        E = getattr(module, "num_experts", 1)
        for attribute, layout in (("lora_A", "rows"), ("lora_B", "columns")):
            layers = getattr(module, attribute, None)
            if isinstance(layers, nn.ModuleDict) and E > 1:
                for parameter in layers.parameters():
                    yield parameter, layout, E


class StackedMuon(OneByOne):
    """Muon of every matrix of a stack: momentum, weight decay and scale are torch.optim.Muon's.

    The iterations of Newton and Schulz run over all matrices of a stack at once.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and not all(p.is_replicate() or p.is_shard(0) for p in parameter.placements):
                    raise OptimizerError(
                        f"optimizer=muon moves stacks that are divided into whole matrices, not {parameter.placements}: use "
                        "optimizer=adamw"
                    )

    def _move(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        # A rank has whole matrices of a divided stack, and moves its own.
        weight, grad, buffer = (local(tensor) for tensor in (parameter, gradient, state["momentum_buffer"]))
        buffer.lerp_(grad, 1 - group["momentum"])
        update = _matrices(grad.lerp(buffer, group["momentum"]), group)
        matrices = _matrices(weight, group)
        scale = 0.2 * max(matrices.shape[-2:]) ** 0.5
        matrices.mul_(1 - group["lr"] * group["weight_decay"])
        matrices.add_(orthogonalized(update), alpha=-group["lr"] * scale)


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of each matrix [..., A, B] close to 1, as torch.optim.Muon does.

    The result is bfloat16[..., A, B].
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    X = matrices.bfloat16()
    X = X.mT if tall else X
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def _matrices(tensor: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """View a parameter as [E, A, B]."""
    E = group["experts"]
    if group["layout"] == "rows":
        return tensor.view(E, -1, tensor.shape[-1])
    if group["layout"] == "columns":
        return tensor.view(len(tensor), -1, E).permute(2, 0, 1)
    return tensor
