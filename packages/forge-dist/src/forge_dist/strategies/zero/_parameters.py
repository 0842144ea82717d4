"""Gather ZeRO-3's parameters outside DeepSpeed's engine; hooks for experts within it.

The former is for models that are not trained: frozen ones, and the second copy that an export is checked with.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from forge_dist.loading._unwrap import is_partitioned


@contextmanager
def computing(model: torch.nn.Module) -> Iterator[None]:
    """Gather each module's own weights while it computes, within the block.

    Forwards are collective and without gradients. A model that is not partitioned is left as it is.
    """
    hooks = gather_on_forward(model)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gather_on_forward(model: torch.nn.Module) -> list[RemovableHandle]:
    """Register hooks that gather each module's own weights while it computes; return them.

    A module that has such hooks keeps those: DeepSpeed refuses to gather a weight within its gathering.
    """
    hooks: list[RemovableHandle] = []
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if is_partitioned(parameter)]
        gathers = any(isinstance(getattr(hook, "__self__", None), _Gathering) for hook in module._forward_pre_hooks.values())
        if own and not gathers:
            gathering = _Gathering(own)
            hooks += [
                module.register_forward_pre_hook(gathering.enter),
                module.register_forward_hook(gathering.leave, always_call=True),
            ]
    return hooks


def give_inputs_gradients(modules: Iterable[torch.nn.Module]) -> None:
    """Make DeepSpeed's leaf modules (experts) wait for their weights' gradients.

    It divides those gradients once that of the module's input is there. Where nothing below trains there is none, and it would
    divide zeros before the backward of the module.
    """
    for module in modules:
        if any(parameter.requires_grad for parameter in module.parameters()):
            module.register_forward_pre_hook(_require_gradient, prepend=True)


def _require_gradient(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not torch.is_grad_enabled() or any(_is_float(given) and given.requires_grad for given in args):
        return None
    return tuple(given.detach().requires_grad_() if _is_float(given) else given for given in args)


def _is_float(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.is_floating_point()


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
def gathered_submodules(model: torch.nn.Module, name: str, modules: Sequence[str]) -> Iterator[None]:
    """Gather those of `modules` that lie within the module of the tensor `name`.

    Collective where they are partitioned.
    """
    parent = name.rpartition(".")[0]
    own = [
        parameter
        for module in modules
        if module.startswith(f"{parent}.")
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
    """Copy the values of one partitioned parameter into another; collective."""
    import deepspeed

    with (
        torch.no_grad(),
        deepspeed.zero.GatheredParameters([source]),
        deepspeed.zero.GatheredParameters([target], modifier_rank=0),
    ):
        target.copy_(source)


def fill_partitioned(target: torch.nn.Parameter, whole: torch.Tensor | None) -> None:
    """Copy a whole tensor, which rank 0 has, into a partitioned parameter; collective."""
    import deepspeed

    with torch.no_grad(), deepspeed.zero.GatheredParameters([target], modifier_rank=0):
        if whole is not None:
            target.copy_(whole)
