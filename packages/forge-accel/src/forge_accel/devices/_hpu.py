"""Intel's Gaudi HPUs in eager mode: `torch.hpu`, which habana_frameworks adds to torch.

After https://docs.habana.ai/en/latest/PyTorch (Theory of Operations, Runtime Environment Variables, Distributed Backend
Initialization) and the calls of Accelerate.
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
"""Variable of the execution mode: 0 eager, 1 lazy. It is read when the library is loaded."""


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
    out_of_memory = "out of memory"

    @classmethod
    def _load(cls) -> None:
        if os.environ.setdefault(_LAZY, "0") not in ("0", "2"):
            raise AccelError(
                f"{_LAZY}={os.environ[_LAZY]}: device=hpu computes in eager mode, as lazy mode needs calls in the loop that "
                f"forge does not make. Unset {_LAZY}, or set it to 0."
            )
        super()._load()

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
