"""ZeRO-3's models outside DeepSpeed's engine, whose forwards and copies must put partitioned weights together themselves.

Elsewhere ZeRO-3 is `_zero`'s: this is for the second copy of a model that an export is checked with, which is never trained, and for frozen models.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether the parameter's data lies in partitions over the ranks, as DeepSpeed notes on it."""
    return hasattr(parameter, "ds_id")


@contextmanager
def computing(model: torch.nn.Module) -> Iterator[None]:
    """Let `model` be called, by all ranks together: each module's own weights are whole while it computes. Without gradients.

    Nothing happens to a model that is not partitioned.
    """
    hooks = gathers_itself(model)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gathers_itself(model: torch.nn.Module) -> list[RemovableHandle]:
    """Let `model` be called so from now on, or until the hooks that are returned are removed."""
    hooks: list[RemovableHandle] = []
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if is_partitioned(parameter)]
        if own:
            gathering = _Gathering(own)
            hooks += [
                module.register_forward_pre_hook(gathering.enter),
                module.register_forward_hook(gathering.leave, always_call=True),
            ]
    return hooks


class _Gathering:
    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._entered: list[AbstractContextManager[Any]] = []

    def enter(self, _module: torch.nn.Module, _args: Any) -> None:
        import deepspeed

        context = deepspeed.zero.GatheredParameters(self._parameters)
        context.__enter__()
        self._entered.append(context)

    def leave(self, _module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)


@contextmanager
def whole_beside(model: torch.nn.Module, name: str, modules: Sequence[str]) -> Iterator[None]:
    """Those of `modules` that lie within the module of the tensor `name` are whole meanwhile; collective where they are partitioned."""
    home = name.rpartition(".")[0]
    own = [
        parameter
        for module in modules
        if module.startswith(f"{home}.")
        for parameter in model.get_submodule(module).parameters()
        if is_partitioned(parameter)
    ]
    if not own:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(own):
        yield


def copy_partitioned(source: torch.nn.Parameter, target: torch.nn.Parameter) -> None:
    """Put the values of one partitioned parameter into another; collective."""
    import deepspeed

    with (
        torch.no_grad(),
        deepspeed.zero.GatheredParameters([source]),
        deepspeed.zero.GatheredParameters([target], modifier_rank=0),
    ):
        target.copy_(source)


def fill_partitioned(target: torch.nn.Parameter, whole: torch.Tensor | None) -> None:
    """Put a whole tensor, which rank 0 has, into a partitioned parameter; collective."""
    import deepspeed

    with torch.no_grad(), deepspeed.zero.GatheredParameters([target], modifier_rank=0):
        if whole is not None:
            target.copy_(whole)
