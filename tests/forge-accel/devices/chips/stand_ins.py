"""Vendors' modules of torch as their documentation has them, and no more: what they lack is an AttributeError.

Each function has the documented arguments, so that a call with others is a TypeError, and is written down in `calls`.

- torch.npu: github.com/Ascend/pytorch, torch_npu/npu/__init__.py (`__all__`), utils.py, memory.py and random.py, as of
  0037c399; hiascend.com, "torch_npu.npu: the same as torch.cuda".
- torch.hpu: docs.habana.ai, PyTorch Theory of Operations, and habana_frameworks/torch/hpu/{__init__,memory,random}.py of
  github.com/HabanaAI/gaudi-pytorch-bridge (1.19.0). What asks about a chip takes it for this process, `device_count` and
  `is_available` do not.
- torch.xpu and torch.mps: torch's own, whose signatures a test compares.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

GIB = 2**30


class Chips:
    """Devices of a kind: their number, name and memory, and the generator of their random numbers."""

    def __init__(self, kind: str, *, count: int = 2, name: str = "Made-up chip", gib: int = 64, bf16: bool = True) -> None:
        self.kind, self.number, self.chip, self.gib, self.bf16 = kind, count, name, gib, bf16
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.current = 0
        self.states = {index: torch.Generator().get_state() for index in range(count)}
        self.library: Any = None

    def at(self, device: Any) -> int:
        """Return the number of a device as the vendors' functions take it."""
        if device is None or isinstance(device, str):
            device = torch.device(device) if device is not None and ":" in device else None
        if isinstance(device, torch.device):
            device = device.index
        number = self.current if device is None else int(device)
        assert 0 <= number < self.number, f"{self.kind} has no device {device}"
        return number

    def bytes(self, which: str) -> int:
        """Read the memory of tensors from the library of made-up chips; 0 without it."""
        return int(getattr(self.library, f"chips_{which}_bytes")()) if self.library is not None else 0

    # -- what all of them have

    def is_available(self) -> bool:
        """Whether there is one."""
        return self.number > 0

    def device_count(self) -> int:
        """How many there are."""
        return self.number

    def current_device(self) -> int:
        """The device of this thread."""
        return self.current

    def set_device(self, device: Any) -> None:
        """Change the device of this thread."""
        self.current = self.at(device)
        if self.library is not None:
            self.library.chips_set_device(self.current)

    def synchronize(self, device: Any = None) -> None:
        """Wait."""
        self.at(device)

    def get_device_name(self, device: Any = None) -> str:
        """Name of the chip."""
        self.at(device)
        return self.chip

    def get_device_properties(self, device: Any = None) -> Any:
        """Its memory."""
        self.at(device)
        return SimpleNamespace(name=self.chip, total_memory=self.gib * GIB, has_fp64=True)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and all memory."""
        self.at(device)
        return self.gib * GIB - self.bytes("held"), self.gib * GIB

    def memory_allocated(self, device: Any = None) -> int:
        """Memory of tensors."""
        self.at(device)
        return self.bytes("held")

    def max_memory_allocated(self, device: Any = None) -> int:
        """Its peak."""
        self.at(device)
        return self.bytes("peak")

    def max_memory_reserved(self, device: Any = None) -> int:
        """Peak of what the allocator took."""
        return self.max_memory_allocated(device)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Reset the peak."""
        self.at(device)
        if self.library is not None:
            self.library.chips_reset_peak()

    def manual_seed_all(self, seed: int) -> None:
        """Seed all devices."""
        self.states = {index: torch.Generator().manual_seed(seed).get_state() for index in range(self.number)}

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """State of a device's generator."""
        return self.states[self.at(device)].clone()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Set it."""
        assert new_state.device.type == "cpu"
        assert new_state.dtype == torch.uint8
        self.states[self.at(device)] = new_state.clone()

    # -- what some have

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Whether it computes bfloat16."""
        return self.bf16 or including_emulation

    def manual_seed(self, seed: int) -> None:
        """Seed this device."""
        self.manual_seed_all(seed)

    def current_allocated_memory(self) -> int:
        """Memory of tensors."""
        return self.bytes("held")

    def recommended_max_memory(self) -> int:
        """Memory that the GPU may take."""
        return self.gib * GIB


def _all(kind: str) -> dict[str, str]:
    """Return the functions that xpu, npu and hpu share, with their arguments."""
    return {
        **dict.fromkeys(("is_available", "device_count", "current_device"), ""),
        **dict.fromkeys(("mem_get_info", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"), "device=None"),
        "manual_seed_all": "seed",
        "get_rng_state": f"device={kind!r}",
        "set_rng_state": f"new_state, device={kind!r}",
    }


DOCUMENTED = {
    "npu": {
        **_all("npu"),
        "set_device": "device",
        "max_memory_reserved": "device=None",
        "synchronize": "device=None",
        "get_device_name": "device_name=None",
        "get_device_properties": "device_name=None",
        "is_bf16_supported": "",
    },
    "hpu": {**_all("hpu"), "synchronize": "", "get_device_name": "device=None"},
    "xpu": {
        **_all("xpu"),
        "set_device": "device",
        "max_memory_reserved": "device=None",
        "synchronize": "device=None",
        "get_device_name": "device=None",
        "get_device_properties": "device=None",
        "is_bf16_supported": "including_emulation=True",
    },
    "mps": {
        "device_count": "",
        "is_available": "",
        "synchronize": "",
        "get_rng_state": "device='mps'",
        "set_rng_state": "new_state, device='mps'",
        "manual_seed": "seed",
        "current_allocated_memory": "",
        "recommended_max_memory": "",
    },
}
"""Kind → function of its module → its arguments, as documented."""


def functions(chips: Chips) -> dict[str, Any]:
    """Return the documented functions of a kind, each of which notes its calls."""

    def make(name: str, arguments: str) -> Any:
        documented: Any = inspect.signature(eval(f"lambda {arguments}: None"))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = documented.bind(*args, **kwargs)
            given = tuple(bound.arguments.values())
            chips.calls.append((name, given))
            if chips.kind == "npu" and name == "is_bf16_supported":
                return chips.bf16
            return getattr(chips, name)(*given)

        call.__name__, call.__signature__ = name, documented  # type: ignore[attr-defined]
        return call

    return {name: make(name, arguments) for name, arguments in DOCUMENTED[chips.kind].items()}


def module_of(chips: Chips) -> ModuleType:
    """Return the module of a kind; what torch itself asks of such a module is there too, and not noted."""
    module: Any = ModuleType(f"torch.{chips.kind}")
    vars(module).update(functions(chips))
    vars(module).update(
        _is_in_bad_fork=lambda: False,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _chips=chips,
    )
    return module


def put_in_torch(chips: Chips) -> None:
    """Make `torch.KIND` the stand-in of these chips, in this process."""
    module = module_of(chips)
    if chips.kind in ("xpu", "mps"):
        vars(getattr(torch, chips.kind)).update(vars(module))
        if chips.kind == "mps":
            torch.backends.mps.is_built = torch.backends.mps.is_available = lambda: True
            torch.backends.mps.is_macos_or_newer = lambda major, minor: True
        return
    if not hasattr(torch, chips.kind):
        torch._register_device_module(chips.kind, module)
    setattr(torch, chips.kind, module)
    sys.modules[f"torch.{chips.kind}"] = module


ORDER = ("npu", "hpu", "xpu", "mps")
"""Kinds as chips.cpp numbers them."""


def load_chips(library: str) -> Any:
    """Load the made-up chips: torch computes on npu, hpu, xpu and mps then, with the CPU's memory and numbers.

    Choose the kind that is torch's accelerator by `use_chips` first; after npu there can be no other.
    """
    torch.ops.load_library(library)
    loaded = ctypes.CDLL(library)
    for name in ("chips_held_bytes", "chips_peak_bytes", "chips_operations"):
        getattr(loaded, name).restype = ctypes.c_int64
    for kind in DOCUMENTED:
        chips = Chips(kind)
        chips.library = loaded
        if kind == "npu":
            # With its name it is torch's accelerator.
            loaded.npu = chips
        else:
            put_in_torch(chips)
    return loaded


def use_chips(loaded: Any, kind: str) -> Chips:
    """Make a kind torch's accelerator, and return its devices."""
    loaded.chips_use(ORDER.index(kind))
    if kind == "npu" and not hasattr(torch, "npu"):
        torch.utils.rename_privateuse1_backend("npu")
        put_in_torch(loaded.npu)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return getattr(torch, kind)._chips
