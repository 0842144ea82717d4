"""Intel's GPUs: torch's own `torch.xpu` (2.5) and xccl (2.8), without Intel's extension.

After https://docs.pytorch.org/docs/stable/xpu.html.
"""

from __future__ import annotations

import torch

from forge_accel._choice import Choice
from forge_accel._errors import AccelError
from forge_accel.devices._memory import BLOCK_BYTES
from forge_accel.devices._module import ModuleAccelerator


class XPUAccelerator(ModuleAccelerator):
    """GPU of Intel: `index`, else the one of the process' LOCAL_RANK, else the first."""

    name = "xpu"
    priority = 90
    vendor = "Intel GPU"
    collectives = "xccl"
    # The second is the driver's, outside of torch's allocator.
    out_of_memory = ("XPU out of memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY")
    quant_types = ("nf4", "fp4", "int8")

    @classmethod
    def possible(cls) -> bool:
        """Return whether torch is built for XPUs."""
        return bool(torch.version.xpu)

    def _total_bytes(self) -> int:
        return int(torch.xpu.get_device_properties(self._index).total_memory)

    def _has_bfloat16(self) -> bool:
        return torch.xpu.is_bf16_supported(including_emulation=False)

    @property
    def collective_backend(self) -> Choice[str]:
        """Xccl, beside gloo for tensors on the CPU; gloo alone where this torch has no xccl."""
        if torch.distributed.is_available() and torch.distributed.is_xccl_available():
            return super().collective_backend
        return Choice("gloo", "gloo: this torch is built without xccl, so only tensors of the CPU go between processes")

    def check_ranks(self, number: int) -> None:
        """Refuse several processes where torch has no xccl."""
        if number > 1 and self.collective_backend.value == "gloo":
            raise AccelError(
                f"{number} processes on xpu: this torch is built without xccl, and gloo moves no tensors of an XPU. Run one "
                "process (nproc_per_node=1), or install a torch with xccl (2.8 or later, from its index for XPUs)."
            )

    @property
    def fused_optimizer(self) -> Choice[bool]:
        """True: torch has the fused kernels for XPUs."""
        return Choice(value=True, reason="fused: torch's fused AdamW has a kernel for XPUs")

    def peak_reserved_bytes(self) -> int | None:
        """Read the peak of what the caching allocator took from the GPU."""
        return torch.xpu.max_memory_reserved(self._index)

    def allocated_bytes(self, size: int) -> int:
        """Round up to torch's blocks of 512 bytes."""
        return -(-size // BLOCK_BYTES) * BLOCK_BYTES
