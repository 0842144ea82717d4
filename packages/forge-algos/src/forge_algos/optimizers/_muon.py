"""Matrices and the rest → one optimizer: torch's Muon on the ones, torch's AdamW on the others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from forge_algos._modules import channel_factors, head


def muon_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable matrices of the numbered layers (`layers.0.`, `h.11.`), in which embeddings and heads have no part.

    Tensors with three dimensions, such as the stacked experts of a mixture, are none: Muon is defined on matrices.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside = {id(p) for module in [*tables, head(model)] if module is not None for p in module.parameters()} | channel_factors(
        model
    )
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.dim() == 2
        and id(parameter) not in outside
        and any(part.isdigit() for part in name.split("."))
    ]


class MuonAdamW(torch.optim.Optimizer):
    """Muon (kellerjordan.github.io/posts/muon) and AdamW as one optimizer, with one state and one list of groups.

    Both steps are torch's own, to the bit. Each group says in `algorithm` which of the two moves it; a saved state says it too.
    Muon's steps are scaled by 0.2 · √(larger side), so that they are as large as AdamW's (arXiv 2502.16982, equation 4).
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[dict[str, Any]],
        *,
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        """Matrices [A, B] for Muon, groups of all else for AdamW, and the arguments of torch.optim.Muon and torch.optim.AdamW."""
        parts: list[tuple[str, torch.optim.Optimizer]] = []
        if matrices:
            parts.append(("muon", torch.optim.Muon(matrices, **muon, adjust_lr_fn="match_rms_adamw")))
        if others:
            parts.append(("adamw", torch.optim.AdamW(list(others), **adamw)))
        # Every group has all that its own algorithm reads; there are no defaults that hold for both.
        groups = [{**group, "algorithm": name} for name, part in parts for group in part.param_groups]
        super().__init__(groups, {"lr": muon["lr"]})
        self._parts = parts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
        """Move the matrices by Muon and the rest by AdamW."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in self._parts:
            # Anew each time: loading a state replaces both.
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.state = self.state
            part.step()
        return loss
