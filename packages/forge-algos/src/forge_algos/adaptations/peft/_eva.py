"""Rows that are trained on → directions in which the inputs of targets vary most (EVA)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from forge_algos._errors import AdapterError
from forge_algos._modules import mode
from forge_algos.batches._learned import RowLoader
from forge_algos.batches._packed import PackedBatch
from forge_algos.isolation._alone import tokens_of
from forge_algos.isolation._guard import guard_packed
from forge_algos.isolation._isolation import require_isolation


def eva_directions(
    model: nn.Module,
    batches: Sequence[PackedBatch],
    *,
    ranks: Mapping[str, int],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, torch.Tensor]:
    """Measure the directions in which targets' inputs vary: EVA's A (arXiv 2410.07170).

    They are the first principal components of all tokens' inputs of a target, found row by row by PEFT's incremental PCA with
    the rank as it is given (EVA's ρ = 1). Rows with fewer tokens than the largest rank are left out.

    Args:
        model: not yet adapted; it may be divided over ranks, all of which are given the same rows.
        batches: rows that are trained on.
        ranks: full name of a linear layer → number of directions.
        autocast: makes the context of the forwards.

    Returns:
        dict: name → float32[rank, M], with orthonormal rows.

    Raises:
        AdapterError: no row has as many tokens as directions are asked for.
    """
    most = max(ranks.values(), default=0)
    long = [batch for batch in batches if len(batch.input_ids) >= most]
    if not long:
        raise AdapterError(
            f"init_lora_weights=eva: no row of {most} tokens to find {most} directions in; lower lora_r, or set "
            "max_tokens_per_gpu higher"
        )
    device = next(model.parameters()).device
    found: dict[str, Any] = {}
    with mode(model, training=False), guard_packed(model), torch.no_grad(), ExitStack() as hooks:
        require_isolation(model, device=device)
        load, seen = RowLoader(model, device), _Inputs()
        for name, rank in ranks.items():
            module = model.get_submodule(name)
            hooks.enter_context(
                module.register_forward_pre_hook(partial(_fit, model, seen, found, name, rank), with_kwargs=True)
            )
        for batch in long:
            with autocast():
                model(**load(batch).inputs)
            seen.clear()
    missing = [name for name in ranks if name not in found]
    if missing:
        raise AdapterError(
            f"init_lora_weights=eva: no row reached {missing[0]} with enough tokens; leave it out of target_modules"
        )
    return {name: found[name].components_.float().contiguous() for name in ranks}


class _Inputs:
    """What was computed of an input of one forward: several layers are given the same."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.Tensor, int, Any]] = []

    def find(self, x: torch.Tensor, rank: int) -> Any:
        """Return the components of another target that was given the very same tensor, or None."""
        return next((pca for held, other, pca in self._held if held is x and other == rank), None)

    def add(self, x: torch.Tensor, rank: int, pca: Any) -> None:
        """Remember the components of an input; the tensor is held, so that no other gets its place."""
        self._held = [*self._held[-3:], (x, rank, pca)]

    def clear(self) -> None:
        """Forget them, after a forward."""
        self._held = []


def _fit(
    model: nn.Module,
    seen: _Inputs,
    found: dict[str, Any],
    name: str,
    rank: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Add a target's inputs to its components; a forward hook."""
    from peft.utils.incremental_pca import IncrementalPCA

    del module
    x = args[0] if args else kwargs["input"]
    if (same := seen.find(x, rank)) is not None:
        found[name] = same
        return
    tokens = tokens_of(model, x).float()
    if len(tokens) < rank:
        return
    pca = found.setdefault(name, IncrementalPCA(n_components=rank, lowrank=2 * rank <= min(tokens.shape), lowrank_seed=42))
    pca.partial_fit(tokens)
    seen.add(x, rank, pca)
