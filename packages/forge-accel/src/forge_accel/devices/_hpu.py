"""Intel's Gaudi HPUs in eager mode: `torch.hpu`, which habana_frameworks adds to torch.

After https://docs.habana.ai/en/latest/PyTorch (Theory of Operations, Runtime Environment Variables, Distributed Backend
Initialization), the bridge's own sources (github.com/HabanaAI/gaudi-pytorch-bridge, 1.19.0) and the calls of Accelerate.
"""

from __future__ import annotations

import os
from importlib import import_module

from forge_accel._choice import Choice
from forge_accel._errors import AccelError
from forge_accel.devices._module import ModuleAccelerator

_HCCL = "habana_frameworks.torch.distributed.hccl"
"""Module that registers the backend."""
_LAZY = "PT_HPU_LAZY_MODE"
"""Variable of the execution mode: 0 eager, all else lazy, by default either. It is read once, when the library is loaded."""
_INTERNAL = "habana_frameworks.torch.utils.internal"
"""Module whose `is_lazy` says which mode that was."""


class HPUAccelerator(ModuleAccelerator):
    """HPU of this process: Gaudi's library gives each one by its LOCAL_RANK.

    Lazy mode is refused: it collects operations until a `mark_step`, and forge's loop makes none.
    """

    name = "hpu"
    priority = 90
    vendor = "Gaudi HPU"
    library = "habana_frameworks"
    imports = ("habana_frameworks.torch",)
    install = "it comes with Intel's Gaudi containers"
    nodes = ("/dev/accel/accel[0-9]*", "/dev/hl[0-9]*")
    collectives = "hccl"
    out_of_memory = ("Allocation failed for size",)
    quant_types = ("nf4", "int8")

    @classmethod
    def _load(cls) -> None:
        remedy = (
            f"device=hpu computes in eager mode, as lazy mode needs calls in the loop that forge does not make. Set {_LAZY}=0"
        )
        if (mode := os.environ.setdefault(_LAZY, "0")) != "0":
            raise AccelError(f"{_LAZY}={mode}: {remedy}, or unset it.")
        super()._load()
        # Something else may have loaded the library before the variable was set: torch itself, transformers or Accelerate.
        if import_module(_INTERNAL).is_lazy():
            raise AccelError(f"Gaudi's library was loaded in lazy mode already: {remedy} before Python starts.")

    def _chosen(self, index: int | None) -> int:
        current = int(self._torch().current_device())
        if index not in (None, current):
            raise AccelError(
                f"device='hpu:{index}': Gaudi's library gives each process one HPU, by its LOCAL_RANK, and here that is "
                f"hpu:{current}: use device=hpu, and HABANA_VISIBLE_MODULES to choose among the cards."
            )
        return current

    def _use(self) -> None:
        """Do nothing: the library has chosen."""

    def _total_bytes(self) -> int:
        return int(self._torch().mem_get_info(self._index)[1])

    def _has_bfloat16(self) -> bool:
        # Every Gaudi has matrix units for it.
        return True

    @property
    def collective_backend(self) -> Choice[str]:
        """Hccl, which its own module registers, beside gloo for tensors on the CPU."""
        import_module(_HCCL)
        return super().collective_backend

    @property
    def fused_optimizer(self) -> Choice[bool]:
        """False: Gaudi has fused optimizers of its own, which are not torch's."""
        return Choice(value=False, reason="not fused: Gaudi's fused optimizers are other classes than torch's")

    def compiling(self, requested: str = "auto", *, operations: float = 0.0) -> Choice[str | None]:
        """Choose Gaudi's own backend of `torch.compile`, the only one that it has."""
        found = super().compiling(requested, operations=operations)
        return found if found.value is None else Choice("hpu_backend", f"{found.reason}, by Gaudi's hpu_backend")
