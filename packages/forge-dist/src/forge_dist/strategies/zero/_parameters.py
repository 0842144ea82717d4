"""Gather ZeRO-3's parameters outside DeepSpeed's engine; hooks for experts within it.

The former is for models that are not trained: frozen ones, and the second copy that an export is checked with.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from forge_dist.loading._modalities import passed_over
from forge_dist.loading._unwrap import base_of, is_partitioned


@contextmanager
def computing(model: torch.nn.Module, *, media: bool = False) -> Iterator[None]:
    """Gather each module's own weights while it computes, within the block.

    Forwards are collective and without gradients. A model that is not partitioned is left as it is. `media` as of
    `gather_on_forward`.
    """
    hooks = gather_on_forward(model, media=media)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gather_on_forward(model: torch.nn.Module, *, media: bool = False) -> list[RemovableHandle]:
    """Register hooks that gather each module's own weights while it computes; return them.

    Where rows have `media`, those of modules that a row without passes over are gathered with the whole model's own: so all
    ranks gather the same, whatever their rows are. A module that has such hooks keeps those: DeepSpeed refuses to gather a
    weight within its gathering.
    """
    hooks: list[RemovableHandle] = []
    base: torch.nn.Module = base_of(model)  # pyrefly: ignore[bad-argument-type]  it came from `load`
    shared = _passed_over(base) if media else {}
    inner = {module for outer in shared.values() for module in outer.modules()}
    for module in model.modules():
        if module in inner:
            continue
        own = [parameter for parameter in module.parameters(recurse=False) if is_partitioned(parameter)]
        if module is base:
            own += [p for outer in shared.values() for p in outer.parameters() if is_partitioned(p)]
        gathers = any(isinstance(getattr(hook, "__self__", None), _Gathering) for hook in module._forward_pre_hooks.values())
        if own and not gathers:
            gathering = _Gathering(own)
            hooks += [
                module.register_forward_pre_hook(gathering.enter),
                module.register_forward_hook(gathering.leave, always_call=True),
            ]
    return hooks


def _passed_over(base: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that a row without images passes over, by their names."""
    return {name: base.get_submodule(name) for name in passed_over(base)}  # pyrefly: ignore[bad-argument-type]


@contextmanager
def gathered_with_the_model(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Let an engine that is made in the block gather the parts for images with the model.

    They are the modules that a row without images passes over.
    Their weights are divided like all others, and are whole from the beginning of the model's forward to its end, and again in
    the backward pass. DeepSpeed follows no module in them: ranks whose rows have images make the same collectives in the same
    order as others.
    """
    import deepspeed

    base: torch.nn.Module = base_of(model)  # pyrefly: ignore[bad-argument-type]  it came from `load`
    found = _passed_over(base)
    places = [(base.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], outer) for name, outer in found.items()]
    for parent, own, outer in places:
        setattr(parent, own, _Weights(outer))
    try:
        yield
    finally:
        for parent, own, outer in places:
            setattr(parent, own, outer)
    for outer in found.values():
        for parameter in outer.parameters():
            deepspeed.zero.register_external_parameter(base, parameter)
        for module in outer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))  # the engine moves those of modules that it knows


class _Weights(torch.nn.Module):
    """Weights of a module, without what computes with them."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        for number, parameter in enumerate(module.parameters()):
            self.register_parameter(str(number), parameter)


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
    """Copy a parameter into another, where one of them at least is partitioned; collective."""
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
