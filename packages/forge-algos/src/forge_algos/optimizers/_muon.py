"""torch's Muon on matrices and torch's AdamW on all else, as one optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from forge_algos._modules import head
from forge_algos.optimizers._closure import Combined
from forge_algos.optimizers._muon_stacks import StackedMuon, stacked_factors
from forge_algos.optimizers._vectors import vectors


def muon_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices of the numbered layers, such as `layers.0.`, and no others.

    Stacks of matrices, those of experts, are not among them: see `muon_stacks`.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside = {id(p) for module in [*tables, head(model)] if module is not None for p in module.parameters()}
    outside |= vectors(model) | {id(p) for p in stacked_factors(model)}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.dim() == 2
        and id(parameter) not in outside
        and any(part.isdigit() for part in name.split("."))
    ]


class MuonAdamW(Combined):
    """Muon (kellerjordan.github.io/posts/muon) and AdamW as one optimizer, with one state.

    Both steps are torch's own, to the bit; stacks of matrices, which torch's Muon does not take, are moved by `StackedMuon`. A
    group's `algorithm` names the one that moves it, in a saved state too. Muon's steps are scaled by 0.2 · √(larger side), so
    that they are as large as AdamW's (arXiv 2502.16982, equation 4).
    """

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        stacks: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        *,
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        """Take groups of matrices [A, B] and of stacks for Muon, and groups of all else for AdamW."""
        parts: list[tuple[str, torch.optim.Optimizer]] = []
        if matrices:
            parts.append(("muon", torch.optim.Muon(list(matrices), **muon, adjust_lr_fn="match_rms_adamw")))
        if stacks:
            parts.append(("muon_stacks", StackedMuon(list(stacks), **muon)))
        if others:
            parts.append(("adamw", torch.optim.AdamW(list(others), **adamw)))
        super().__init__(parts)
