"""Model on the meta device → the same on a device of one's choice, without data.

Parameters and buffers become fake tensors: every kernel runs as a computation of shapes, on the device that it would have run
on. What a batch holds stays as it is. So where documents begin, and what a mask lets through, is read and followed, and only
what depends on weights is not known.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_mode() -> FakeTensorMode:
    """Return a mode whose tensors without data may meet others.

    A kernel that asks where their data lie gets an error, and no address at which there is nothing.
    """
    with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def without_launches() -> Iterator[None]:
    """Let Triton's kernels do nothing inside the block.

    What those of flash-linear-attention or Liger write has been allocated before.
    """
    # It comes with torch's builds for GPUs; where nobody has imported it, it has no kernels.
    kernels: Any = getattr(sys.modules.get("triton"), "KernelInterface", None)
    if kernels is None:
        yield
        return
    launch = kernels.__getitem__
    kernels.__getitem__ = lambda _kernel, _grid: _nothing
    try:
        yield
    finally:
        kernels.__getitem__ = launch


def _nothing(*_args: Any, **_how: Any) -> None:
    """Take the place of a kernel's launch."""


def without_data(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Replace every tensor of `model` by one without data on `device`, tied ones by one."""
    made: dict[int, torch.Tensor] = {}
    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        if id(tensor) not in made:
                            made[id(tensor)] = _fake(tensor, device)
                        tensors[name] = made[id(tensor)]  # pyrefly: ignore[unsupported-operation]
    return model


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return data
    parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
    if hasattr(tensor, "quant_state"):
        # bitsandbytes' own class cannot hold a tensor without data; its layers read no more of it than this.
        for name, value in vars(tensor).items():
            setattr(parameter, name, _fake_state(value, device) if name == "quant_state" else value)
    return parameter


def _fake_state(state: Any, device: torch.device) -> Any:
    """Return the constants of a quantized weight without data."""
    found = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            setattr(found, name, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device))
    if state.nested:
        found.state2 = _fake_state(state.state2, device)
    return found
