"""Importance of targets on rows of earlier tasks, for adaptive ranks (arXiv 2504.07097)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from forge_algos._counted import counted
from forge_algos._errors import AdapterError, UnevenRanksError
from forge_algos._modules import gathering, mode
from forge_algos._parallel import ALONE, Parallel
from forge_algos.adaptations.osft._delta import is_transposed
from forge_algos.batches._learned import RowLoader
from forge_algos.batches._packed import PackedBatch
from forge_algos.isolation._alone import lengths_of_lines
from forge_algos.isolation._guard import guard_packed
from forge_algos.isolation._isolation import require_isolation


def osft_importance(
    model: nn.Module,
    batches: Sequence[PackedBatch],
    *,
    targets: Sequence[str],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    parallel: Parallel = ALONE,
) -> dict[str, float]:
    """Measure how little each target turns its input: the mean of cos(X, W X), scaled to mean 1.

    The inner mean is over all tokens, the outer over the targets.
    """
    given, squares = parallel.sum([len(batches), len(batches) ** 2])
    if parallel.data_parallel_size * squares != given**2:
        raise UnevenRanksError(
            f"importance: this rank was given {counted(len(batches), 'rows')} and others not; give every rank equally many"
        )
    if not given:
        raise AdapterError("osft_rank='adaptive' measures importance on rows of the tasks before, and was given none")
    square, layered = _measured_modules(model, targets)
    seen = {module: _Mean() for module in dict.fromkeys([*square.values(), *layered.values()])}
    device = next(model.parameters()).device
    with mode(model, training=False), guard_packed(model), torch.no_grad(), gathering(model), ExitStack() as hooks:
        require_isolation(model, device=device)
        load = RowLoader(model, device)
        for module, mean in seen.items():
            hooks.enter_context(module.register_forward_hook(partial(_record_cosines, model, mean), with_kwargs=True))
        for batch in batches:
            with autocast():
                model(**load(batch).inputs)
    sums = parallel.sum([number for mean in seen.values() for number in mean.read()])
    means = {module: sums[2 * i] / sums[2 * i + 1] for i, module in enumerate(seen) if sums[2 * i + 1]}
    if any(mean != mean for mean in means.values()):  # noqa: PLR0124  NaN
        raise AdapterError("importance: the model's hidden states hold NaN; look at its files, or measure in float32")
    found = {**_to_mean_one(square, means), **_to_mean_one(layered, means)}
    return {name: found.get(name, 1.0) for name in targets}


class _Mean:
    """Running mean of cosines, summed where they are computed and read once."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, before: torch.Tensor, after: torch.Tensor, lengths: torch.Tensor | None) -> None:
        cosines = nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
        if lengths is not None:
            # Documents in lines: what fills them up is no token.
            cosines = cosines[torch.arange(cosines.shape[1], device=lengths.device) < lengths[:, None]]
        total = cosines.sum(dtype=torch.float64 if cosines.device.type == "cpu" else None)
        self._sum = total if self._sum is None else self._sum + total
        self._count += cosines.numel()

    def read(self) -> tuple[float, int]:
        return (0.0 if self._sum is None else float(self._sum)), self._count


def _record_cosines(
    model: nn.Module, mean: _Mean, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Record the cosines of a module's forward; a forward hook."""
    before = args[0] if args else kwargs["hidden_states"]
    after = output[0] if isinstance(output, tuple) else output
    if _is_linear(module) and module.bias is not None:
        after = after - module.bias
    mean.add(before, after, lengths_of_lines(model))


def _is_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


def _is_square(linear: Any) -> bool:
    # By the layer's own numbers: ZeRO-3 leaves no shape to a weight.
    return linear.nx == linear.nf if is_transposed(linear) else linear.in_features == linear.out_features


def _measured_modules(model: nn.Module, targets: Sequence[str]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return (square targets → themselves, other targets → their decoder layers).

    Stacks of expert matrices, each of which sees some tokens only, count by their layers.
    """
    square: dict[str, nn.Module] = {}
    layered: dict[str, nn.Module] = {}
    modules = dict(model.named_modules())
    for name in targets:
        module: Any = modules.get(name)
        if _is_linear(module) and _is_square(module):
            square[name] = module
        elif (layer := _layer(model, name)) is not None:
            layered[name] = layer
    return square, layered


def _layer(model: nn.Module, name: str) -> nn.Module | None:
    """Return the decoder layer that holds a module: an element of the outermost list.
    Lists inside of a layer are experts, for instance.
    """
    module, parts = model, name.split(".")
    for i, part in enumerate(parts[:-2]):
        module = module.get_submodule(part)
        if isinstance(module, nn.ModuleList):
            return module.get_submodule(parts[i + 1])
    return None


def _to_mean_one(homes: dict[str, nn.Module], means: dict[nn.Module, float]) -> dict[str, float]:
    found = {name: max(0.0, means[module]) for name, module in homes.items() if module in means}
    total = sum(found.values())
    return {name: value * len(found) / total for name, value in found.items()} if total else dict.fromkeys(found, 1.0)
